"""Numbers of workers, wanted and counted by state, and one sample of their load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from dynaplan.graph.lifecycle import Role
from dynaplan.util.documents import number_field, object_field


@dataclass(frozen=True)
class WorkerCounts:
    """The workers of one role by state (``dynaplan.graph.lifecycle.WorkerState``).

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
class PoolSizes:
    """Numbers of prefill and decode workers: current, proposed or desired."""

    prefill: int = 0
    decode: int = 0

    def of(self, role: Role) -> int:
        return self.prefill if role is Role.PREFILL else self.decode

    def plus(self, role: Role, workers: int) -> PoolSizes:
        """Return a copy with ``workers`` more of the role; fewer when negative."""
        if role is Role.PREFILL:
            return replace(self, prefill=self.prefill + workers)
        return replace(self, decode=self.decode + workers)

    def __str__(self) -> str:
        return f"prefill {self.prefill}, decode {self.decode}"


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
