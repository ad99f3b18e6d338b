"""The observation: everything that a decision may depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from dynaplan.domain.planning.holds import RoleHolds
from dynaplan.domain.planning.scaling import DesiredCounts
from dynaplan.domain.planning.traffic import Foresight, Traffic
from dynaplan.domain.wire.documents import number_field, object_field


@dataclass(frozen=True)
class WorkerCounts:
    """The workers of one role by state (``dynaplan.domain.lifecycle.WorkerState``).

    Ready ones whose engine is ``asleep`` are counted there alone: they keep their GPUs and serve nobody.
    ``gpus`` are the GPUs of one worker. ``startup_s`` is the time from start to ready of the last one that
    started, 0 when not known. ``unmanaged`` are registered ones that no ``serve`` has started: they are in
    no state.
    """

    ASLEEP: ClassVar = "asleep"
    STATES: ClassVar = ("starting", "ready", "draining", "backoff", "failed", ASLEEP)

    starting: int = 0
    ready: int = 0
    draining: int = 0
    backoff: int = 0
    failed: int = 0
    gpus: float = 0
    startup_s: float = 0.0
    asleep: int = 0
    unmanaged: int = 0

    @property
    def present(self) -> int:
        """Workers that count towards the desired number: all but the draining ones."""
        return self.holding + self.failed

    @property
    def holding(self) -> int:
        """Present workers that hold GPUs: a failed worker holds none."""
        return self.starting + self.ready + self.asleep + self.backoff

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> WorkerCounts:
        """Read ``{state: count}``; unknown states are ignored, numbers below 0 are 0. Raises ValueError."""
        counts = {state: int(max(0.0, number_field(document, state, 0))) for state in cls.STATES}
        gpus, startup_s = (max(0.0, number_field(document, key, 0)) for key in ("gpus", "startup_s"))
        unmanaged = int(max(0.0, number_field(document, "unmanaged", 0)))
        return cls(**counts, gpus=gpus, startup_s=startup_s, unmanaged=unmanaged)


@dataclass(frozen=True)
class FleetCounts:
    """The workers of a deployment. ``gpus_total`` are the GPUs of the box, 0 when not known."""

    prefill: WorkerCounts = field(default_factory=WorkerCounts)
    decode: WorkerCounts = field(default_factory=WorkerCounts)
    gpus_total: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the published fleet, as ``from_json`` reads it."""
        counts = {"prefill": self.prefill, "decode": self.decode}
        return {
            "roles": {
                role: {state: getattr(each, state) for state in each.STATES} for role, each in counts.items()
            },
            "gpus_per_worker": {role: each.gpus for role, each in counts.items()},
            "startup_s": {role: each.startup_s for role, each in counts.items()},
            "gpus_total": self.gpus_total,
            "unmanaged": {role: each.unmanaged for role, each in counts.items()},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> FleetCounts:
        """Read the published fleet; raises ValueError, and nothing else, when it is not one."""
        roles = object_field(document, "roles", {})
        gpus = object_field(document, "gpus_per_worker", {})
        startup_s = object_field(document, "startup_s", {})
        unmanaged = object_field(document, "unmanaged", {})

        def counts(role: str) -> WorkerCounts:
            times = {"gpus": gpus.get(role, 0), "startup_s": startup_s.get(role, 0)}
            times["unmanaged"] = unmanaged.get(role, 0)
            return WorkerCounts.from_json({**object_field(roles, role, {}), **times})

        gpus_total = int(max(0.0, number_field(document, "gpus_total", 0)))
        return cls(counts("prefill"), counts("decode"), gpus_total)


@dataclass(frozen=True)
class Sample:
    """One metric pull. None is "no data"; ``..._missing`` says why there is none.

    ``at_s`` is monotonic seconds. ``kv_usage`` is the mean over the decode workers that answered, 0 to 1
    and above with waiting requests; ``prefill_queue`` is the depth of the whole queue in prompts. Numbers
    of workers are of the registered ones that are awake; ``..._asleep`` are the registered others.
    """

    at_s: float
    kv_usage: float | None = None
    kv_missing: str = ""
    prefill_queue: float | None = None
    queue_missing: str = ""
    waiting_requests: int = 0
    prefill_workers: int = 0
    decode_workers: int = 0
    decode_asleep: int = 0
    prefill_asleep: int = 0


@dataclass(frozen=True)
class Load:
    """The pulls of one interval, averaged. Numbers of workers are those at the last pull.

    They are of the registered ones that are awake; ``..._asleep`` are the others. ``changed`` tells how
    the numbers of workers changed in the interval; "" when they did not.
    """

    pulls: int = 0
    kv_usage: float | None = None
    kv_missing: str = ""
    prefill_queue: float | None = None
    prefill_queue_first: float | None = None
    prefill_queue_last: float | None = None
    queue_missing: str = ""
    prefill_workers: int = 0
    decode_workers: int = 0
    changed: str = ""
    decode_asleep: int = 0
    prefill_asleep: int = 0


@dataclass(frozen=True)
class Observation:
    """One adjustment interval; ``at_s`` is monotonic seconds.

    ``traffic`` and ``foresight`` are None for policies that do not plan for targets. ``startup_s`` is the
    time of a worker from start to ready, the slower role's. ``unknown`` says why the fleet and the desired
    counts could not be read, ``failure`` why the previous decision was not carried out; both are "" when
    all is well. ``holds`` are those in force.
    """

    at_s: float
    fleet: FleetCounts = field(default_factory=FleetCounts)
    desired: DesiredCounts = field(default_factory=DesiredCounts)
    load: Load = field(default_factory=Load)
    unknown: str = ""
    failure: str = ""
    traffic: Traffic | None = None
    foresight: Foresight | None = None
    startup_s: float = 0.0
    holds: RoleHolds = field(default_factory=RoleHolds)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back; without holds or sleepers no key for them."""
        document, holds = asdict(self), self.holds.to_json()
        del document["holds"]
        fleet, load = document["fleet"], document["load"]
        for part, key in (
            (fleet["prefill"], "asleep"),
            (fleet["decode"], "asleep"),
            (fleet["prefill"], "unmanaged"),
            (fleet["decode"], "unmanaged"),
            (load, "prefill_asleep"),
            (load, "decode_asleep"),
        ):
            if not part[key]:
                del part[key]
        return {**document, "holds": holds} if holds else document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Observation:
        """Read the mapping that ``to_json`` makes; KeyError or TypeError for another."""
        fleet, traffic, foresight = document["fleet"], document.get("traffic"), document.get("foresight")
        return cls(
            at_s=document["at_s"],
            fleet=FleetCounts(
                WorkerCounts(**fleet["prefill"]), WorkerCounts(**fleet["decode"]), fleet["gpus_total"]
            ),
            desired=DesiredCounts(**document["desired"]),
            load=Load(**document["load"]),
            unknown=document["unknown"],
            failure=document["failure"],
            traffic=Traffic.from_json(traffic) if traffic else None,
            foresight=Foresight.from_json(foresight) if foresight else None,
            startup_s=document.get("startup_s", 0.0),
            holds=RoleHolds.from_json(document.get("holds", {})),
        )
