"""The learnt floor in a decision: it learns from the interval, raises minimums, and keeps workers.

With ``learnt-floor`` it raises the minimums always. Without, only while the error budget is overspent, and
then only to what is there already: workers stay, none is added (``planner/sizing/error_budget.py``). That is
for the forecast: an expert of the hedge that stands still was tried on the same arrivals, and may have fewer.

**Exchange.** But a debt also says that the GPUs were with the wrong role. A forecast sizes for a rate that
lasts: a batch of 400 prompts in 30 s is to it 13 requests/s that need prefill workers, while they all decode
at once. So while the budget is overspent, and the floor fits the GPUs that there are or that the forecast
asks for (the more of both), no role has fewer of them than the floor; the other role has what is left:

    gpus = max(GPUs now, GPUs of the sizing),  the size is the sizing with the floor as minimums, fit to gpus

**Intervals without an end.** Answers of a batch end after it, often in an interval without requests. So the
fluid goes on in such an interval, and one in which no answer has ended yet counts with the recent lengths.

**Surprises.** A forecast says what is likely, and bursts are what it does not say. A worker that leaves
because the next minutes are forecast to be quiet is asked for again in the burst after them, and serves a
start-up time later. Two things are known of that: how far the load has exceeded its forecasts lately (the
*surprise*, ``planner/sizing/demand_forecast.py``), and how many workers, standing still, would have kept the
promise (the floor). Neither will do alone:

- sized for the surprise as if it lasted, there are too many: a burst may be over before its queue is late,
  which the floor's fluid knows and the queueing model of a steady load does not;
- the floor alone holds what the crest of a wave needed through its trough, though the next crest is forecast.

So of each role as many stay as both say:

    stay = min(current, floor, needed for the forecast + surprise)

with the forecast for the time when workers of this decision would be wanted at the latest. Where forecasts
hold, the surprise is small, and the workers leave with the load; and a burst is forgotten after the window of
the promise (``slo-window``). No constant of its own: the surprise leaves out as many requests as the promise
lets miss.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings, SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.planner.bursts.arrived_load import arrived_demand, lasting_demand
from dynaplan.planner.bursts.memory import Standing, StandingTrial
from dynaplan.planner.bursts.standing import learnt_floor, tried
from dynaplan.planner.model import Demand, Observation, PlannerState, Sizing, Step, WorkerLimits
from dynaplan.planner.sizing.error_budget import is_overspent
from dynaplan.planner.sizing.limits import UNBOUNDED_GPUS, fit_budget, raise_to
from dynaplan.planner.sizing.pool_sizes import size_pools
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel


def with_learnt_floor(
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    service: ServiceModel,
    limits: WorkerLimits,
    current: Targets,
) -> tuple[Standing, WorkerLimits, list[Step]]:
    """Return the trials after the interval, the limits with the floor as minimums, and the step of the trail.

    The floor fits the GPU budget; where it does not fit beside higher minimums these stay.
    """
    if not settings.slo_window_s:
        return state.bursts.standing, limits, []
    after = _after(settings, state.bursts.standing, observation, service, limits)
    is_owed = is_overspent(state.error_budget, settings.slo_window_s)
    if not settings.learnt_floor and not is_owed:
        return after, limits, []
    floor = learnt_floor(after, settings.targets(), limits, is_aggregated=service.prefill is None)
    why = f"{floor}, standing still, would have kept the promise lately" if floor.decode else "nothing learnt"
    if not settings.learnt_floor:
        floor = Targets(min(floor.prefill, current.prefill), min(floor.decode, current.decode))
        why = f"the error budget is overspent, no worker leaves below {floor}: {why}"
    least = raise_to(floor, limits.least)
    if least == limits.least or limits.gpus(least) > limits.max_gpus:
        least, why = limits.least, f"{why}: the minimums stay"
    step = Step("learnt floor", current, current, why)
    return after, replace(limits, least=least), [step]


def _after(
    settings: PlannerSettings,
    before: Standing,
    observation: Observation,
    service: ServiceModel,
    limits: WorkerLimits,
) -> Standing:
    """Return the trials after the interval; without data they stay as they were."""
    traffic = observation.traffic
    if traffic is None or traffic.requests is None:
        return before
    if not traffic.arrivals:
        fade = math.exp(-traffic.interval_s / settings.slo_window_s)
        return without_requests(before, fade) if not traffic.requests else before
    foresight = observation.foresight
    demand = arrived_demand(traffic, foresight, settings) or lasting_demand(traffic, foresight, settings)
    return tried(
        before,
        traffic.arrivals,
        service,
        demand,
        settings.targets(),
        settings.slo_window_s,
        traffic.interval_s,
        limits,
    )


def without_requests(before: Standing, fade: float) -> Standing:
    """Return the trials after a time without requests: queues are empty, and the past counts ``fade``."""

    def faded(trials: tuple[StandingTrial, ...]) -> tuple[StandingTrial, ...]:
        return tuple(StandingTrial(0.0, fade * each.late) for each in trials)

    return Standing(fade * before.requests, faded(before.prefill), faded(before.decode))


def kept_for_surprises(
    sizing: Sizing,
    surprised: Demand | None,
    standing: Standing,
    service: ServiceModel,
    targets: SlaTargets,
    limits: WorkerLimits,
    current: Targets,
) -> Sizing:
    """Return the sizing without the removals that a surprise may make regretted.

    ``surprised`` is the demand that is forecast, and the surprise on top; None: it is not known, and all that
    the sizing removes leaves.
    """
    if surprised is None or all(sizing.targets.of(role) >= current.of(role) for role in SCALED_ROLES):
        return sizing
    floor = learnt_floor(standing, targets, limits, is_aggregated=service.prefill is None)
    if not floor.decode:
        return sizing
    needed = size_pools(
        service, surprised, targets, replace(limits, max_gpus=UNBOUNDED_GPUS), current
    ).targets
    stay = Targets(
        min(current.prefill, floor.prefill, needed.prefill), min(current.decode, floor.decode, needed.decode)
    )
    after = limits.cap(raise_to(sizing.targets, stay))
    if after == sizing.targets or limits.gpus(after) > limits.max_gpus:
        return sizing
    why = (
        f"no worker leaves below {stay}: the load may exceed its forecast, as it has lately, and reach "
        f"{surprised.requests_per_s:.1f} requests/s; {floor}, standing still, would have kept the promise"
    )
    step = Step("surprises", sizing.targets, after, why)
    return replace(sizing, targets=after, steps=(*sizing.steps, step), prediction=None)


def exchanged(
    sizing: Sizing,
    settings: PlannerSettings,
    state: PlannerState,
    service: ServiceModel,
    limits: WorkerLimits,
    current: Targets,
) -> Sizing:
    """Return the sizing with the floor's split of the GPUs, while the error budget is overspent.

    ``limits`` have the floor as minimums already, as far as its workers are there.
    """
    if not settings.slo_window_s or not is_overspent(state.error_budget, settings.slo_window_s):
        return sizing
    standing, is_aggregated = state.bursts.standing, service.prefill is None
    floor = learnt_floor(standing, settings.targets(), limits, is_aggregated=is_aggregated)
    gpus = min(limits.max_gpus, max(limits.gpus(current), limits.gpus(sizing.targets)))
    wanted = limits.cap(raise_to(sizing.targets, floor))
    after = fit_budget(
        wanted, replace(limits, least=limits.cap(raise_to(floor, limits.least)), max_gpus=gpus)
    )
    if not floor.decode or after is None or after == sizing.targets:
        return sizing
    why = f"{floor}, standing still, would have kept the promise lately, with the {gpus} GPUs that there are"
    step = Step("exchange", sizing.targets, after, why)
    return replace(sizing, targets=after, steps=(*sizing.steps, step), prediction=None)
