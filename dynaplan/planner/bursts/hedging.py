"""The hedge in a decision (``hedge``): experts are tried on what came, and the trusted one is asked.

The experts and the trust in them stand in ``experts.py``. Limits, holds and failed workers come after it, as
after every size.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings, SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.bursts.arrived_load import arrived_demand, lasting_demand
from dynaplan.planner.bursts.evidence import Counted
from dynaplan.planner.bursts.experts import ExpertPanel, chosen, followed, tried, wants
from dynaplan.planner.bursts.fluid import Work
from dynaplan.planner.bursts.interval import Arrived
from dynaplan.planner.bursts.memory import ExpertTrial, Hedge, Lived, Missed
from dynaplan.planner.model import Observation, PlannerState, Sizing, Step, WorkerLimits
from dynaplan.planner.sizing.error_budget import missed_requests
from dynaplan.planner.sizing.limits import fit_budget, raise_to
from dynaplan.planner.sizing.look_ahead import lookahead
from dynaplan.planner.sizing.pool_sizes import size_pools
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, SteadyState


def hedged(
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    sizing: Sizing,
    service: ServiceModel,
    limits: WorkerLimits,
    current: Targets,
) -> tuple[PlannerState, Sizing]:
    """Return the next state, and the sizing with what the trusted expert wants instead of the forecast's.

    Without arrivals by pull nothing is learnt, and following alone counts until something is.
    """
    if not settings.hedge or not settings.slo_window_s:
        return state, sizing
    box = min(settings.max_gpu_budget, observation.fleet.gpus_total or settings.max_gpu_budget)
    panel, wish = ExpertPanel(replace(limits, max_gpus=box), service.prefill is None), sizing.targets
    if len(panel.experts) < 2:
        return state, sizing
    hedge = state.bursts.hedge
    came = _came(settings, observation, service)
    ahead = lookahead(observation.startup_s, settings.adjustment_interval_s)
    if came:
        hedge = hedge if hedge.followed else replace(hedge, followed=(current,))
        fade = math.exp(-came.interval_s / settings.slo_window_s)
        hedge = tried(hedge, panel, came, settings.targets(), fade)
        least = _least(hedge, came, settings, panel.limits, current)
        hedge = replace(hedge, leasts=(*hedge.leasts, least)[-1 - ahead.intervals :])
    hedge = followed(hedge, wish, ahead.intervals, settings.adjustment_interval_s, settings.slo_window_s)
    if not hedge.seconds:
        return _with_hedge(state, hedge), sizing
    trusted = chosen(hedge, panel, settings.targets(), box * ahead.until_s, wish)
    hedge = replace(hedge, trusted=(trusted.workers, trusted.follows))
    state = _with_hedge(state, hedge)
    after = fit_budget(wants(trusted, wish, hedge), limits) or wish
    prediction = sizing.prediction if after == wish else None
    steps = (*sizing.steps, Step("hedge", wish, after, _why(hedge, trusted, panel)))
    return state, replace(sizing, targets=after, steps=steps, prediction=prediction)


def _with_hedge(state: PlannerState, hedge: Hedge) -> PlannerState:
    return replace(state, bursts=replace(state.bursts, hedge=hedge))


def remembered_hedge(hedge: Hedge, fade: float) -> Hedge:
    """Return the hedge that a planner begins with, by that of the one before: the past counts ``fade``.

    Queues have emptied, nothing is being followed, and the trusted expert is trusted still.
    """
    lived, most = hedge.lived, hedge.most
    for wish in hedge.followed:
        most = raise_to(most, wish)
    return replace(
        hedge,
        trials=tuple(_remembered_trial(each, fade) for each in hedge.trials),
        followed=(),
        leasts=(),
        most=most,
        seconds=fade * hedge.seconds,
        requests=fade * hedge.requests,
        lived=Lived(_remembered_trial(lived.trial, fade), fade * lived.late, fade * lived.long),
    )


def _remembered_trial(trial: ExpertTrial, fade: float) -> ExpertTrial:
    late, long = (
        Missed(fade * each.requests, fade**2 * (each.squares + each.run**2))
        for each in (trial.late, trial.long)
    )
    held_gpu_s = fade * trial.held_gpu_s
    begun = replace(trial.emptied(), late_s=0.0, chased_s=0.0, helped_s=0.0)
    return replace(begun, held_gpu_s=held_gpu_s, late=late, long=long)


def _least(
    hedge: Hedge, came: Arrived, settings: PlannerSettings, limits: WorkerLimits, current: Targets
) -> Targets:
    """Return the workers that the mean load of the window needs: nobody stands still below them."""
    if came.work is None:
        return hedge.least
    state = came.work.state
    rate = hedge.requests / hedge.seconds
    demand = replace(state.demand, requests_per_s=rate, burstiness=1.0, dispersions=())
    return size_pools(state.service, demand, settings.targets(), limits, current).targets


def _why(hedge: Hedge, trusted: ExpertTrial, panel: ExpertPanel) -> str:
    alone = panel.trials(hedge)[0]
    alone_gpus, gpus = (each.held_gpu_s / hedge.seconds for each in (alone, trusted))
    if (trusted.workers, trusted.follows) == (alone.workers, True):
        return "following the forecast has kept the promise lately, and nothing cheaper has"
    missed, alone_missed = (
        (each.late.requests + each.long.requests) / max(1.0, hedge.requests) for each in (trusted, alone)
    )
    how = "following with at least" if trusted.follows else "standing still at"
    return (
        f"{how} {trusted.workers} would have held {gpus:.3g} GPUs lately and missed {missed:.1%}, "
        f"following the forecast alone {alone_gpus:.3g} and {alone_missed:.1%}"
    )


def _came(settings: PlannerSettings, observation: Observation, service: ServiceModel) -> Arrived | None:
    """Return what came in the interval; None where it is not known by pull."""
    traffic = observation.traffic
    if traffic is None or traffic.requests is None:
        return None
    load = observation.load
    served = Targets(load.prefill_workers if service.prefill else 0, load.decode_workers)
    if not served.decode or (service.prefill and not served.prefill):
        served = Targets()
    if not traffic.arrivals:
        silence = Arrived(traffic.interval_s, observation.startup_s, served=served)
        return None if traffic.requests else silence
    foresight = observation.foresight
    demand = arrived_demand(traffic, foresight, settings) or lasting_demand(traffic, foresight, settings)
    work = Work(SteadyState(service, demand), settings.targets())
    gives_way = bool(settings.prefill_deadline_ms)
    is_evidence = served.decode and not load.changed
    counted = _counted(traffic, service, served, settings.targets()) if is_evidence else None
    return Arrived(
        traffic.interval_s,
        observation.startup_s,
        traffic.requests,
        traffic.arrivals,
        work,
        gives_way,
        served,
        counted,
    )


def _counted(traffic: Traffic, service: ServiceModel, served: Targets, targets: SlaTargets) -> Counted | None:
    """Return the misses that frontends counted; else the estimate of the error budget, if it has one."""
    missed = missed_requests(service, traffic, served, targets)
    if not missed:
        return None
    requests = max(traffic.requests or 0.0, *missed, 1.0)
    late, long = missed
    return Counted(served, late, min(long * (1 - late / requests), requests - late))
