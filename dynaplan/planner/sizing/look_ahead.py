"""The time span that a decision is for, the demands in it, and numbers of workers that cover them all.

**Look-ahead.** Decisions are made every T seconds (adjustment interval), and a worker is ready L seconds
after it is requested (start-up time). Workers of this decision serve from L on, those of the next one from
L + T on. So this decision must carry every demand between L and L + T; what comes sooner no decision can
help. Forecasts are asked for until L + T, rounded up to whole intervals: the next one, the last one, and
the one half way (``demand_forecast.py``); one more demand is the largest with the backlog (below). A measured
load above its forecast is a demand, too: forecasts need some intervals to follow a jump.

**More workers** as soon as one of these demands needs them: the size, *wanted*, is the largest number per
role over all demands. Workers that are starting already count as there (*current* is what was asked for).

**Fewer workers**: scaling down is decided by backtests alone (``planner/backtesting``).

**Over the GPU budget** the demand that needs the most GPUs is sized to fit it.

Wrong where the load changes within an interval: a demand is a mean over one.

**Backlog**: prompts that wait already are demand too, on top of the forecast. The queueing model describes a
steady state; a queue that a surge left behind is not in it. So what will wait for prefill when a worker that
is asked for now could serve is added to the largest demand. With L the start-up time and T the adjustment
interval (seconds), r the soonest demand (requests/s; the measured one where that is higher) and u the rate
that one prefill worker computes (requests/s):

    computed = u (ready + (starting + restarting) / 2)      starting workers are ready half of that time
    backlog  = waiting now + (r - computed) L               requests, when a new worker could serve
    demand   = largest demand + backlog / (L + T)           requests/s, where backlog > 0

The backlog is to be worked off in L + T seconds, by when workers of the next decision could serve. *Waiting
now* is the depth of the prefill queue at the last metric pull less the prompts that workers hold (prefill
workers x ``max-concurrent-prefills``), at least 0, and 0 where it is not known. u is r over the utilisation
of one worker at its largest batch (``prefill_model.py``).

Wrong for aggregated services, which have no shared queue (none is added), and where lengths of waiting
prompts differ from those of the forecast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import DecisionStep, Demand, Observation, Sizing, WorkerLimits
from dynaplan.planner.sizing.limits import UNBOUNDED_GPUS, within_limits
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState


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


def size_for_all(size: Sizer, demands: Sequence[Demand], current: PoolSizes, limits: WorkerLimits) -> Sizing:
    """Return the workers that suffice for each of these demands within the limits.

    ``current`` without any.
    """
    if not demands:
        why = "no data: change nothing, because no demand is known"
        return Sizing(current, (DecisionStep("demand", current, current, why),))
    sizes = [size(demand, replace(limits, max_gpus=UNBOUNDED_GPUS)) for demand in demands]
    wanted = _largest(sizes, limits)
    if limits.gpus(limits.cap(wanted.workers)) <= limits.max_gpus:
        _, bounds = within_limits(wanted.workers, limits, current)
        return replace(wanted, steps=(*wanted.steps, *bounds))
    largest = max(range(len(demands)), key=lambda number: limits.gpus(sizes[number].workers))
    return size(demands[largest], limits)


Sizer = Callable[[Demand, WorkerLimits], Sizing]
"""Computes the workers that a demand needs within limits."""


def _largest(sizings: Sequence[Sizing], limits: WorkerLimits) -> Sizing:
    """Return the largest number of each role, with the trail of the demand that needs most GPUs."""
    chosen = max(sizings, key=lambda sizing: limits.gpus(sizing.workers))
    most = PoolSizes(
        max(sizing.workers.prefill for sizing in sizings), max(sizing.workers.decode for sizing in sizings)
    )
    if most == chosen.workers:
        return chosen
    step = DecisionStep(
        "together", chosen.workers, most, f"another of the {len(sizings)} demands needs more workers"
    )
    return Sizing(most, (*chosen.steps, step))


def backlog_demand(
    service: QueueingModel,
    demands: Sequence[Demand],
    observation: Observation,
    interval_s: float,
) -> Demand | None:
    """Return the largest forecast demand plus the rate at which the backlog of prompts has to be computed.

    None where no prompt will wait in the queue when the workers asked for now are ready. Of ``demands`` the
    soonest is the first.
    """
    soonest = demands[0]
    state = SteadyState(service, soonest)
    if state.is_aggregated or not soonest.requests_per_s:
        return None
    per_worker = soonest.requests_per_s / state.prefill_waiting(1).utilisation
    counts = observation.fleet.prefill
    computed_per_s = per_worker * (counts.ready + counts.unmanaged + (counts.starting + counts.backoff) / 2)
    ahead_s = lookahead(observation.startup_s, interval_s)
    backlog = _waiting(service, observation)
    backlog += (soonest.requests_per_s - computed_per_s) * ahead_s.from_s
    if backlog <= 0:
        return None
    largest = max(demands, key=lambda demand: demand.requests_per_s)
    return replace(largest, requests_per_s=largest.requests_per_s + backlog / ahead_s.until_s)


def _waiting(service: QueueingModel, observation: Observation) -> float:
    """Return the prompts in the queue that no prefill worker holds."""
    load = observation.load
    if service.prefill is None or load.prefill_queue_last is None:
        return 0.0
    held = load.prefill_workers * service.prefill.concurrent_prefills
    return max(0.0, load.prefill_queue_last - held)
