"""The time that a decision is for, and one size for all the demands in it.

**Look-ahead.** Decisions are made every T seconds (adjustment interval), and a worker serves L seconds
after it is asked for (start-up time). Workers of this decision serve from L on, those of the next one from
L + T on. So this decision must carry every demand between L and L + T; what comes sooner no decision can
help. Forecasts are asked for until L + T, rounded up to whole intervals: the next one, the last one, and
the one half way (``demand_forecast.py``); one more demand is the largest with the backlog (``backlog.py``).

**More workers** as soon as one of these demands needs them: the size, *wanted*, is the largest number per
role over all demands. Workers that are starting already count as there (*current* is what was asked for).

**Fewer workers** only when the remaining ones would carry every demand (that with the backlog too) grown by
``headroom`` (a fraction; ``planner/rules/sla_policy.py``), and the demand of the finished interval, not
grown, where it is known:

    kept = min(current, max(wanted, needed for (1 + headroom) x each demand, needed now))

*needed* with what the error budget lets miss over a whole window, *wanted* with what it lets miss until the
next decision serves (``error_budget.py``). Without it a worker at the edge between two sizes would come and
go in turns; and a forecast of less load is no reason to remove a worker that is needed now. A demand whose
size is not known needs the current number.

**Over the GPU budget** the demand that needs most GPUs is sized within it; *kept* is not looked at then, so
one role may lose workers to the other.

Wrong where the load changes within an interval: a demand is a mean over one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dynaplan.fleet.counts import Targets
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.planner.model.sizing import Sizing, WorkerLimits
from dynaplan.planner.model.targets import Step
from dynaplan.planner.model.traffic import Demand
from dynaplan.planner.sizing.gpu_budget import UNBOUNDED, within_limits


@dataclass(frozen=True)
class Lookahead:
    """The time that a decision is for, in seconds from now.

    Workers that the decision adds serve from ``from_s`` on, those of the next decision from ``until_s`` on.
    ``intervals`` is ``until_s`` in adjustment intervals, rounded up.
    """

    from_s: float
    until_s: float
    intervals: int


def lookahead(startup_s: float, interval_s: float) -> Lookahead:
    """Return how far ahead demand must be forecast, with workers that take ``startup_s`` to start."""
    until_s = max(0.0, startup_s) + interval_s
    return Lookahead(max(0.0, startup_s), until_s, math.ceil(until_s / interval_s))


def size_for_all(
    size: Sizer,
    survive: Sizer,
    demands: Sequence[Demand],
    current: Targets,
    limits: WorkerLimits,
    headroom: float,
    now: Demand | None = None,
) -> Sizing:
    """Return the workers for all of these demands, which reach until ``until_s``; the module has the rules.

    ``size`` sizes for a worker that is added, ``survive`` for the remaining ones when one is removed: they
    may differ in what the error budget lets miss. ``now`` is the demand of the interval that is over.
    """
    if not demands:
        why = "no data: change nothing, because no demand is known"
        return Sizing(current, (Step("demand", current, current, why),))
    unbounded = replace(limits, max_gpus=UNBOUNDED)
    sizes = [size(demand, unbounded) for demand in demands]
    wanted = _largest(sizes, limits)
    if any(wanted.targets.of(role) < current.of(role) for role in SCALED_ROLES):
        to_survive = [demand.times(1 + headroom) for demand in demands] + ([now] if now else [])
        needed = _largest([survive(demand, unbounded) for demand in to_survive], limits)
        wanted = _keep_survivors(wanted, needed, current, headroom)
    if limits.gpus(limits.capped(wanted.targets)) <= limits.max_gpus:
        _, bounds = within_limits(wanted.targets, limits, current)
        return replace(wanted, steps=(*wanted.steps, *bounds))
    largest = max(range(len(demands)), key=lambda number: limits.gpus(sizes[number].targets))
    return size(demands[largest], limits)


Sizer = Callable[[Demand, WorkerLimits], Sizing]
"""Computes the workers that a demand needs within limits."""


def _keep_survivors(wanted: Sizing, needed: Sizing, current: Targets, headroom: float) -> Sizing:
    """Keep workers that the grown demands, or the demand of now, still need."""
    after, reasons = wanted.targets, []
    for role in SCALED_ROLES:
        stay = min(current.of(role), max(after.of(role), needed.targets.of(role)))
        if stay > after.of(role):
            reasons.append(f"{stay} {role.value} workers stay, not {after.of(role)}")
            after = after.plus(role, stay - after.of(role))
    why = f"now, or with {headroom:.0%} more requests, " + (
        "; ".join(reasons) or "the remaining workers are enough"
    )
    prediction = wanted.prediction if after == wanted.targets else None
    return Sizing(after, (*wanted.steps, Step("survivors", wanted.targets, after, why)), prediction)


def _largest(sizings: Sequence[Sizing], limits: WorkerLimits) -> Sizing:
    """Return the largest number of each role, with the trail of the demand that needs most GPUs."""
    chosen = max(sizings, key=lambda sizing: limits.gpus(sizing.targets))
    most = Targets(
        max(sizing.targets.prefill for sizing in sizings), max(sizing.targets.decode for sizing in sizings)
    )
    if most == chosen.targets:
        return chosen
    step = Step("together", chosen.targets, most, f"another of the {len(sizings)} demands needs more workers")
    return Sizing(most, (*chosen.steps, step))
