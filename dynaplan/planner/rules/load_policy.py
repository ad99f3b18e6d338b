"""The load policy: thresholds per worker on the metrics of an interval.

Source: Dynamo's load planner, ``examples/llm/components/planner.py`` and its documentation; differences are
named where they are. Two signals, each per worker: requests in the prefill queue over the prefill workers,
and mean KV usage of the decode workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dynaplan.config.settings.planner import (
    NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD,
    PlannerSettings,
)
from dynaplan.contract.counts import PoolSizes, Sample
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import AverageLoad, DecisionStep, Observation, PlannerState
from dynaplan.planner.rules import guards


def average_load(samples: Sequence[Sample]) -> AverageLoad:
    """Return the pulls of one interval as one load: the mean over pulls, each a mean over workers already.

    Dynamo takes one mean over all workers of all pulls, so that pulls with more workers weigh more there.
    """
    if not samples:
        return AverageLoad(kv_missing="nothing was measured", queue_missing="nothing was measured")
    usages = [usage for sample in samples if (usage := finite(sample.kv_usage)) is not None]
    depths = [depth for sample in samples if (depth := finite(sample.prefill_queue)) is not None]
    last = samples[-1]
    return AverageLoad(
        pulls=len(samples),
        kv_usage=_mean(usages),
        kv_missing="" if usages else last.kv_missing or "no decode worker answered",
        prefill_queue=_mean(depths),
        prefill_queue_first=depths[0] if depths else None,
        prefill_queue_last=depths[-1] if depths else None,
        queue_missing="" if depths else last.queue_missing or "the prefill queue did not answer",
        prefill_workers=last.prefill_workers,
        decode_workers=last.decode_workers,
        changed=_changes(samples),
        decode_asleep=last.decode_asleep,
        prefill_asleep=last.prefill_asleep,
    )


def finite(value: float | None) -> float | None:
    """Return the value, or None when it is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class Signal:
    """The load per worker that scales one role, with its thresholds.

    ``load`` None: no data, because ``missing``. ``serving`` is the number of workers behind it.
    ``predicted`` is the load that its trend leads to, None where the role has no trend rule.
    """

    name: str
    load: float | None
    missing: str
    down: float
    up: float
    serving: int
    predicted: float | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.load:.3g}"


@dataclass(frozen=True)
class Situation:
    """The inputs that a stage may look at; no stage goes below the ``floor``."""

    settings: PlannerSettings
    state: PlannerState
    observation: Observation
    current: PoolSizes
    floor: PoolSizes = field(default_factory=PoolSizes)

    @property
    def is_disaggregated(self) -> bool:
        """True with a prefill pool; aggregated workers scale like decode workers."""
        return self.current.prefill > 0

    def signal(self, role: Role) -> Signal:
        return self._queue_signal() if role is Role.PREFILL else self._kv_signal()

    def _queue_signal(self) -> Signal:
        settings, load = self.settings, self.observation.load
        workers = max(1, load.prefill_workers)
        depth, first, last = (
            finite(value) for value in (load.prefill_queue, load.prefill_queue_first, load.prefill_queue_last)
        )
        predicted = None
        if first is not None and last is not None:
            predicted = (last + (last - first) * NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD) / workers
        return Signal(
            "the queue per prefill worker",
            None if depth is None else depth / workers,
            load.queue_missing or "the prefill queue did not answer",
            settings.prefill_queue_scale_down_threshold,
            settings.prefill_queue_scale_up_threshold,
            load.prefill_workers,
            predicted,
        )

    def _kv_signal(self) -> Signal:
        settings, load = self.settings, self.observation.load
        return Signal(
            "the mean KV usage",
            finite(load.kv_usage),
            load.kv_missing or "no decode worker answered",
            settings.decode_kv_scale_down_threshold,
            settings.decode_kv_scale_up_threshold,
            load.decode_workers,
        )


Stage = Callable[[Situation, PoolSizes], tuple[PoolSizes, str]]
"""Takes the targets of the stage before it; returns its own, and why."""


def scale_down(role: Role) -> Stage:
    """Make the stage that removes a worker of the role below the lower threshold, if no guard objects."""

    def stage(situation: Situation, targets: PoolSizes) -> tuple[PoolSizes, str]:
        signal = situation.signal(role)
        if signal.load is None:
            return targets, f"no data: change nothing, because {signal.missing}"
        if not signal.load < signal.down:
            return targets, f"{signal} is not below {signal.down:g}"
        obstacle = _against_removing(situation, role, signal, signal.load, targets)
        if obstacle:
            return targets, f"{signal} is below {signal.down:g}, but {obstacle}"
        return targets.plus(role, -1), f"{signal} is below {signal.down:g}: one {role.value} worker fewer"

    return stage


def scale_up(role: Role) -> Stage:
    """Make the stage that adds a worker of the role above the upper threshold, unless its queue shrinks."""

    def stage(situation: Situation, targets: PoolSizes) -> tuple[PoolSizes, str]:
        signal = situation.signal(role)
        if signal.load is None:
            return targets, f"no data: change nothing, because {signal.missing}"
        if not signal.load > signal.up:
            return targets, f"{signal} is not above {signal.up:g}"
        if trend := _against_trend(signal):
            return targets, f"{signal} is above {signal.up:g}, but {trend}"
        return targets.plus(role, 1), f"{signal} is above {signal.up:g}: one {role.value} worker more"

    return stage


def bound(situation: Situation, before: PoolSizes, wanted: PoolSizes) -> list[DecisionStep]:
    """Return the step that takes an addition back, where a guard objects to it; none where none does."""
    fleet = situation.observation.fleet
    for role in SCALED_ROLES:
        if wanted.of(role) <= before.of(role):
            continue
        if why := guards.failure_reason(fleet, role):
            return [DecisionStep("failures", wanted, before, why)]
        if why := guards.against_missing(fleet, situation.current, role):
            return [DecisionStep("missing", wanted, before, why)]
        if why := guards.against_budget(situation.settings, fleet, situation.current, before, role):
            return [DecisionStep("budget", wanted, before, why)]
    return []


def _against_removing(
    situation: Situation, role: Role, signal: Signal, load: float, targets: PoolSizes
) -> str:
    """Return the first objection to removing a worker of the role."""
    settings, workers = situation.settings, targets.of(role)
    gpus = guards.gpus_of(settings, situation.observation.fleet, role)
    return (
        guards.against_minimum(settings, role, workers, gpus)
        or guards.against_floor(role, workers, situation.floor.of(role))
        or (guards.against_grace(situation.state) if role is Role.DECODE else "")
        or guards.against_consolidation(settings, load, signal.up, signal.serving, workers)
    )


def _against_trend(signal: Signal) -> str:
    """Object to adding a prefill worker when the queue shrinks and will be short enough soon.

    The trend goes on from the first and the last pull of the interval, over 3 intervals: last + (last -
    first) x 3.
    """
    if signal.predicted is None or signal.predicted > signal.up:
        return ""
    ahead = NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD
    return f"its trend leads to {signal.predicted:.3g}, not above {signal.up:g}, within {ahead} intervals"


def _mean(values: Sequence[float]) -> float | None:
    return finite(sum(values) / len(values)) if values else None


def _changes(samples: Sequence[Sample]) -> str:
    """Tell how the numbers of workers changed from pull to pull, at most four of them."""
    seen = [PoolSizes(sample.prefill_workers, sample.decode_workers) for sample in samples]
    different = [seen[0], *(now for before, now in pairwise(seen) if now != before)]
    return " -> ".join(map(str, different[:4])) if len(different) > 1 else ""
