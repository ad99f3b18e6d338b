"""Short ways to write down an interval as the planner sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, Sample, WorkerCounts
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.planner.model import Decision, Observation, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.load_policy import average_load

SEEDS = PlannerSettings(
    prefill_queue_scale_up_threshold=5.0, prefill_queue_scale_down_threshold=0.2, consolidation_guard=False
)
"""The original's thresholds with one prefill worker, without the guard that it does not have."""


def workers(prefill: int, decode: int) -> FleetCounts:
    """A fleet in which everybody is ready, one GPU each."""
    return FleetCounts(WorkerCounts(ready=prefill, gpus=1), WorkerCounts(ready=decode, gpus=1))


def interval(
    prefill: int, decode: int, kv: float | None = 0.7, queue: Sequence[float] = (), at_s: float = 0.0
) -> Observation:
    """One interval with settled workers; ``queue`` are depths of the whole queue, one for each pull."""
    pulls: list[float | None] = list(queue) or [None]
    samples = [
        Sample(at_s, kv_usage=kv, prefill_queue=depth, prefill_workers=prefill, decode_workers=decode)
        for depth in pulls
    ]
    return Observation(
        at_s=at_s,
        fleet=workers(prefill, decode),
        desired=DesiredCounts(prefill, decode, 4, 4),
        load=average_load(samples),
    )


def outcome(
    settings: PlannerSettings, observation: Observation, state: PlannerState | None = None
) -> PoolSizes:
    """What is desired after that interval."""
    return decide(settings, state or PlannerState(), observation)[1].desired


def story(decision: Decision) -> str:
    """The whole trail as text."""
    return "\n".join(f"{step.stage}: {step.why}" for step in decision.steps)


def with_fleet(observation: Observation, fleet: FleetCounts) -> Observation:
    return replace(observation, fleet=fleet)
