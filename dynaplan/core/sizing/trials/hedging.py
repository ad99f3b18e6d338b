"""The hedge in a decision (``hedge``): experts are tried on what came, and their weighted mean is asked for.

The experts, their costs and the trust in them stand in ``experts.py`` and ``regret.py``. A change is asked
for only where the mean has left the current number by ``DEAD_BAND`` workers of a role. Limits, holds and
failed workers come after it, as after every size.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.core.sizing.fluid import Work
from dynaplan.core.sizing.gpu_budget import fit
from dynaplan.core.sizing.look_ahead import lookahead
from dynaplan.core.sizing.measured_load import measured_demand
from dynaplan.core.sizing.queueing.queueing_model import ServiceModel, SteadyState
from dynaplan.core.sizing.trials.experts import Arrived, ExpertPanel, tried, wants
from dynaplan.domain.planning.decisions import PlannerState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.sizing import Hedge, Sizing, WorkerLimits
from dynaplan.domain.planning.targets import Step, Targets
from dynaplan.domain.settings.planner import PlannerSettings


def hedged(
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    sizing: Sizing,
    service: ServiceModel,
    limits: WorkerLimits,
    current: Targets,
) -> tuple[PlannerState, Sizing]:
    """Return the next state, and the sizing with what the experts together want instead of the forecast's.

    Without arrivals by pull nothing is learnt, and following alone counts until something is.
    """
    if not settings.hedge or not settings.slo_window_s:
        return state, sizing
    box = min(settings.max_gpu_budget, observation.fleet.gpus_total or settings.max_gpu_budget)
    panel, wish = ExpertPanel(replace(limits, max_gpus=box), service.prefill is None), sizing.targets
    if len(panel.experts) < 2:
        return state, sizing
    hedge = state.hedge
    came = _came(settings, observation, service)
    ahead = lookahead(observation.startup_s, settings.adjustment_interval_s)
    if came and hedge.followed:
        fade = math.exp(-came.interval_s / settings.slo_window_s)
        hedge = tried(hedge, panel, came, settings.targets(), fade, box * ahead.until_s)
    hedge = replace(hedge, followed=(*hedge.followed, wish)[-1 - ahead.intervals :])
    state = replace(state, hedge=hedge)
    if not hedge.seconds:
        return state, sizing
    after, why = _together(panel, hedge, wish, current)
    after = fit(after, limits) or wish
    prediction = sizing.prediction if after == wish else None
    steps = (*sizing.steps, Step("hedge", wish, after, why))
    return state, replace(sizing, targets=after, steps=steps, prediction=prediction)


def _came(settings: PlannerSettings, observation: Observation, service: ServiceModel) -> Arrived | None:
    """Return what came in the interval; None where it is not known by pull."""
    traffic = observation.traffic
    if traffic is None or traffic.requests is None:
        return None
    if not traffic.requests:
        return Arrived(traffic.interval_s, observation.startup_s)
    demand = measured_demand(traffic)
    if demand is None or not traffic.arrivals:
        return None
    work = Work(SteadyState(service, demand), settings.targets())
    return Arrived(traffic.interval_s, observation.startup_s, traffic.requests, traffic.arrivals, work)


def _together(panel: ExpertPanel, hedge: Hedge, wish: Targets, current: Targets) -> tuple[Targets, str]:
    """Return the mean of what the experts want, in whole workers, and why."""
    trusted, trials = panel.trust(hedge), panel.trials(hedge)
    wanted = [(part, wants(trial, wish)) for part, trial in zip(trusted, trials, strict=True)]
    after = Targets(
        _whole(sum(part * each.prefill for part, each in wanted), current.prefill),
        _whole(sum(part * each.decode for part, each in wanted), current.decode),
    )
    part, best = max(zip(trusted, trials, strict=True), key=lambda each: each[0])
    alone_gpus, best_gpus = (each.cost_gpu_s / hedge.seconds for each in (trials[0], best))
    if best.workers == trials[0].workers and best.follows:
        return after, f"following the forecast has cost least lately (trusted {part:.0%})"
    how = "following with at least" if best.follows else "standing still at"
    why = (
        f"{how} {best.workers} would have cost {best_gpus:.3g} GPUs lately, late requests at their "
        f"price included, and following the forecast alone {alone_gpus:.3g} (trusted {part:.0%} and "
        f"{trusted[0]:.0%})"
    )
    return after, why


DEAD_BAND = 0.75
"""Workers by which the mean must differ from the number asked for until now. At a half it would come and
go where the mean is between two numbers; at 1 a single worker would never be followed while any doubt is
left."""


def _whole(mean: float, current: int) -> int:
    return current if abs(mean - current) < DEAD_BAND else round(mean)
