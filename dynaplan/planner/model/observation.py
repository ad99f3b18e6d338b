"""The observation: everything that a decision may depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dynaplan.fleet.counts import FleetCounts, WorkerCounts
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.model.traffic import Foresight


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
