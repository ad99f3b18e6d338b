"""One interval run through the fluid: the queue and the answers of each expert, and what missed a target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.events.dispatch_order import DispatchRule
from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.bursts.evidence import Counted, Served, late_by_evidence, long_by_evidence
from dynaplan.planner.bursts.fluid import Work, decoded, late_by_chance, queued, queued_by_deadline
from dynaplan.planner.bursts.memory import Decoding, ExpertTrial, Hedge

DISPATCH = DispatchRule(DisaggregationSettings.prefill_late_wait_s)
"""The rule by which late prompts that have waited for long take turns."""


@dataclass(frozen=True)
class Arrived:
    """An interval: the requests that came in each of its pulls, and their work; None without pulls.

    ``by_deadline``: late prompts give way to the others. ``served`` are the workers at its end, ``counted``
    the misses with them; None where the workers changed.
    """

    interval_s: float
    startup_s: float
    requests: float = 0.0
    arrivals: Sequence[float] = ()
    work: Work | None = None
    by_deadline: bool = True
    served: Targets = field(default_factory=Targets)
    counted: Counted | None = None

    @property
    def pull_s(self) -> float:
        """The seconds of a metric pull."""
        return self.interval_s / len(self.arrivals)

    def serving(self, wishes: Sequence[int]) -> list[int]:
        """Return the workers that serve in each pull where these numbers were asked for, the newest last.

        A worker serves that was wanted all through the start-up time before.
        """
        backs = (
            math.ceil(max(0.0, self.startup_s - pull * self.pull_s) / self.interval_s)
            for pull in range(len(self.arrivals))
        )
        return [min(wishes[-1 - back :] if back < len(wishes) else wishes) for back in backs]


def fared(before: Hedge, came: Arrived) -> list[tuple[ExpertTrial, float, float]]:
    """Return each trial after the interval, with its requests over the TTFT, and over the ITL alone."""
    if came.work is None:
        return [(each.emptied(), 0.0, 0.0) for each in before.trials]
    return TriedInterval(before, came, came.work).fared()


class TriedInterval:
    """An interval that all experts are run through; those with the same prefill workers share their queue."""

    def __init__(self, before: Hedge, came: Arrived, work: Work) -> None:
        self._trials = before.trials
        self._came = came
        self._work = work
        self._least = [
            came.serving([each.decode for each in before.leasts or (Targets(),)]),
            came.serving([each.prefill for each in before.leasts or (Targets(),)]),
        ]
        self._lived = before.lived
        self._prompts_per_s = work.prompts_per_s
        self._room_s = work.room_s
        self._served = [
            came.serving([each.decode for each in before.followed]),
            came.serving([each.prefill for each in before.followed]),
        ]
        self._by_chance: dict[int, float] = {}
        self._queues: dict[tuple[object, ...], tuple[ExpertTrial, float, list[float]]] = {}

    def fared(self) -> list[tuple[ExpertTrial, float, float]]:
        """Return each trial after the interval, and its requests over the TTFT, and over the ITL alone."""
        return [self._fared(trial) for trial in self._trials]

    def _fared(self, trial: ExpertTrial) -> tuple[ExpertTrial, float, float]:
        workers, has_help = trial.workers.prefill or trial.workers.decode, self._has_help(trial)
        key = workers, has_help, trial.queue, trial.in_time, trial.late_s
        if key not in self._queues:
            self._queues[key] = self.queue(trial)
        queued, late, out = self._queues[key]
        decoding, long = self.decoding(trial, out)
        long *= 1 - min(1.0, late / max(self._came.requests, 1.0))
        late, long = self._by_evidence(trial, late, long)
        queue, in_time, late_s = queued.queue, queued.in_time, queued.late_s
        return replace(trial, queue=queue, in_time=in_time, late_s=late_s, decoding=decoding), late, long

    def _by_evidence(self, trial: ExpertTrial, late: float, long: float) -> tuple[float, float]:
        """Return the misses of the interval, corrected by what was counted."""
        counted, lived = self._came.counted, self._lived
        if counted is None:
            return late, long
        decodes = self._serving(trial, Role.DECODE)
        prefills = self._serving(trial, Role.PREFILL) if trial.workers.prefill else [0]
        had = Served(Targets(min(prefills), min(decodes)), Targets(max(prefills), max(decodes)))
        late = late_by_evidence(late, had, trial, lived, counted)
        long = long_by_evidence(long, had, trial, lived, counted)
        late = min(late, self._came.requests)
        return late, min(long, self._came.requests + trial.decoding.total - late)

    def _serving(self, trial: ExpertTrial, role: Role) -> list[int]:
        """Return the workers that serve in each pull; of an aggregated service the same for both roles."""
        is_prefill = role is Role.PREFILL and bool(trial.workers.prefill)
        number = trial.workers.prefill if is_prefill else trial.workers.decode
        served = self._served if self._has_help(trial) else self._least
        return [max(number, each) for each in served[is_prefill]]

    def _has_help(self, trial: ExpertTrial) -> bool:
        """Tell whether workers serve that were added because of the forecast."""
        return trial.follows or trial.helped_s > self._came.startup_s

    def queue(self, trial: ExpertTrial) -> tuple[ExpertTrial, float, list[float]]:
        """Return the trial with its queue after the interval, its late prompts, and the computed ones."""
        queue, in_time, late_s, late, out = trial.queue, trial.in_time, trial.late_s, 0.0, []
        pull_s, room_s = self._came.pull_s, self._room_s
        gives_way = bool(trial.workers.prefill) and self._came.by_deadline
        target_s = self._work.targets.ttft_ms / 1000
        for arrived, workers in zip(self._came.arrivals, self._serving(trial, Role.PREFILL), strict=True):
            per_s = workers * self._prompts_per_s
            after, part = queued(queue, arrived, pull_s, per_s, room_s)
            late_s = late_s + pull_s if queue - in_time > 1 else 0.0
            left = 1 - DISPATCH.owed_share(late_s - target_s)
            in_time, over = queued_by_deadline(in_time, arrived, pull_s, left * per_s, room_s)
            chance = self._chance(workers, gives_way=gives_way)
            late += min(arrived, over + chance * arrived) if gives_way else max(part, chance) * arrived
            out.append(queue + arrived - after)
            queue = after
        return replace(trial, queue=queue, in_time=in_time, late_s=late_s), late, out

    def _chance(self, workers: int, *, gives_way: bool) -> float:
        """Return the part of the prompts that is late by chance."""
        if workers not in self._by_chance:
            came, per_s = self._came, workers * self._prompts_per_s
            rate = came.requests / came.interval_s
            self._by_chance[workers] = late_by_chance(
                rate, per_s, self._room_s, self._work.unevenness, gives_way=gives_way
            )
        return self._by_chance[workers]

    def decoding(self, trial: ExpertTrial, came: Sequence[float]) -> tuple[Decoding, float]:
        """Return what decodes after the interval, and the answers known in it to be too slow."""
        pull_s, work = self._came.pull_s, self._work
        decoding, long = trial.decoding, 0.0
        serving = self._serving(trial, Role.DECODE)
        for arrived, workers in zip(came, serving, strict=True):
            decoding, missed = decoded(decoding, arrived, pull_s, workers, work)
            long += missed
        return decoding, long
