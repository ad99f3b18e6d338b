"""The SLA policy: the workers that the coming traffic needs to meet the targets."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaplan.core.planning import guards
from dynaplan.core.planning.scale_down import delay_scale_down, late_roles
from dynaplan.core.sizing import error_budget
from dynaplan.core.sizing.backlog import with_backlog
from dynaplan.core.sizing.corrections import corrected
from dynaplan.core.sizing.formula import Formula
from dynaplan.core.sizing.look_ahead import Size, lookahead, plan
from dynaplan.core.sizing.pool_sizes import size
from dynaplan.core.sizing.queueing_model import ServiceModel
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.decisions import PlannerState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.scaling import SCALED_ROLES
from dynaplan.domain.planning.sizing import Sizing, SlaTargets, WorkerLimits
from dynaplan.domain.planning.targets import Step, Targets
from dynaplan.domain.planning.traffic import Demand, Expected, Foresight, Lengths
from dynaplan.domain.settings.planner import PlannerSettings


@dataclass(frozen=True)
class SlaModel:
    """What the engines can do: as a queueing model, and, where asked for, for the formulas."""

    service: ServiceModel
    formula: Formula | None = None

    def service_for(self, current: Targets) -> ServiceModel:
        """The service; aggregated where there is no prefill pool."""
        return self.service if current.prefill else replace(self.service, prefill=None)


def plan_for_targets(
    model: SlaModel,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    current: Targets,
) -> tuple[PlannerState, Sizing]:
    """The workers that the coming traffic needs, within every limit, with the story; and the next state."""
    limits = limits_of(settings, observation, current)
    state = _after_interval(model, settings, state, observation, current)
    state, notes = _corrections(model, settings, state, observation, current)
    foresight, traffic = observation.foresight, observation.traffic
    is_seen = traffic is None or traffic.requests is not None
    if foresight is None or not foresight.expected or not is_seen:
        missing = traffic.missing if traffic else ""
        why = f"no data: change nothing, because {missing or 'no traffic was seen yet'}"
        return state, Sizing(current, (*notes, Step("demand", current, current, why)))
    if model.formula:
        expected, targets = foresight.expected[0], settings.targets()
        sizing = model.formula.size(
            expected, foresight.interval_s, targets, state.corrections, limits, current
        )
    else:
        sizing = _plan(model, settings, state, observation, foresight, limits, current)
        late = late_roles(model.service_for(current), observation, settings.targets())
        state, sizing = delay_scale_down(settings, state, observation, sizing, limits, current, late)
    sizing = _without_failing_roles(observation, sizing, current)
    return state, replace(sizing, steps=(*notes, *sizing.steps))


def limits_of(settings: PlannerSettings, observation: Observation, current: Targets) -> WorkerLimits:
    """The GPUs and the minimums. GPUs of workers that leave, or that nobody asked for, are not to be had."""
    fleet = observation.fleet
    budget = min(settings.max_gpu_budget, fleet.gpus_total or settings.max_gpu_budget)
    held = guards.gpus_held(settings, fleet, current, current)
    gpus = {role: guards.gpus_of(settings, fleet, role) for role in SCALED_ROLES}
    asked = sum(current.of(role) * gpus[role] for role in SCALED_ROLES)
    least = {role: guards.least_workers(settings, gpus[role]) for role in SCALED_ROLES}
    return WorkerLimits(
        max_gpus=max(budget - (held - asked), min(asked, budget)),
        prefill_gpus=gpus[Role.PREFILL],
        decode_gpus=gpus[Role.DECODE],
        least=Targets(least[Role.PREFILL] if current.prefill else 0, least[Role.DECODE]),
    )


def _corrections(
    model: SlaModel,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    current: Targets,
) -> tuple[PlannerState, list[Step]]:
    traffic, load = observation.traffic, observation.load
    if settings.no_correction or traffic is None:
        return state, []
    if load.changed:
        why = f"corrections stay: the workers changed in this interval ({load.changed})"
        return state, [Step("corrections", current, current, why)]
    serving = Targets(load.prefill_workers, load.decode_workers)
    if model.formula:
        after, why = model.formula.corrections(
            state.corrections, traffic, serving.decode, is_aggregated=not current.prefill
        )
    else:
        after, why = corrected(
            model.service_for(current), state.corrections, traffic, serving, settings.targets()
        )
    return replace(state, corrections=after), [Step("corrections", current, current, why)]


def _after_interval(
    model: SlaModel,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    current: Targets,
) -> PlannerState:
    """The error budget after what was missed in the interval that is over."""
    traffic, load, targets = observation.traffic, observation.load, settings.targets()
    if traffic is None or traffic.requests is None or not settings.slo_window_s:
        return state
    serving = Targets(load.prefill_workers, load.decode_workers)
    shares = error_budget.missed(model.service_for(current), traffic, serving, targets)
    after = error_budget.after(state.error_budget, shares, traffic, targets, settings.slo_window_s)
    return replace(state, error_budget=after)


def _plan(
    model: SlaModel,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    foresight: Foresight,
    limits: WorkerLimits,
    current: Targets,
) -> Sizing:
    corrections = state.corrections
    service = model.service_for(current).slowed(
        effective_correction(corrections.prefill), effective_correction(corrections.decode)
    )
    demands = [
        demand_of(settings, foresight, each) for each in foresight.expected if each.requests is not None
    ]
    now = _of_now(settings, foresight, observation)
    if demands:
        backlog = with_backlog(service, demands, now, observation, settings.adjustment_interval_s)
        demands += [backlog] if backlog else []
    hurried, patient, note = _promises(settings, state, observation, foresight)

    def sized(targets: SlaTargets) -> Size:
        return lambda demand, bounds: size(service, demand, targets, bounds, current)

    headroom = _headroom(settings, foresight.expected[0])
    sizing = plan(sized(hurried), sized(patient), demands, current, limits, headroom, now)
    return replace(sizing, steps=(*(Step("promise", current, current, each) for each in note), *sizing.steps))


def _of_now(settings: PlannerSettings, foresight: Foresight, observation: Observation) -> Demand | None:
    """The demand of the interval that is over, with the lengths that are expected; None is "not known"."""
    traffic = observation.traffic
    if traffic is None or not traffic.requests:
        return None
    seen = replace(
        foresight.expected[0], requests=traffic.requests * foresight.interval_s / traffic.interval_s
    )
    return demand_of(settings, foresight, seen)


def _promises(
    settings: PlannerSettings, state: PlannerState, observation: Observation, foresight: Foresight
) -> tuple[SlaTargets, SlaTargets, list[str]]:
    """What is promised for now: for who is added, for who stays when others leave, and a word on that.

    A worker that is not added now can be added next time: what is left must do until that one serves. Who is
    removed now should not be wanted back before the window is over.
    """
    targets, requests = settings.targets(), foresight.expected[0].requests
    if not settings.slo_window_s or not requests:
        return targets, targets, []
    soon_s = lookahead(observation.startup_s, settings.adjustment_interval_s).until_s
    rate = requests / foresight.interval_s
    hurried = error_budget.spending(state.error_budget, targets, rate, soon_s, observation.startup_s)
    patient = error_budget.spending(state.error_budget, targets, rate, max(soon_s, settings.slo_window_s))
    return hurried, patient, [error_budget.in_words(state.error_budget, hurried)]


CLOSE_ENOUGH = 1.15
"""A correction nearer to 1 is not believed: model and measurement are never closer than that, and sizes that
follow their difference would come and go under a load that does not change."""


def effective_correction(correction: float) -> float:
    """The factor that steps are multiplied by."""
    return 1.0 if 1 / CLOSE_ENOUGH < correction < CLOSE_ENOUGH else correction


def _headroom(settings: PlannerSettings, soonest: Expected) -> float:
    """The part by which demand may still grow before a worker that is removed now were missed.

    By as much as a forecast is usually too low: where load is foretold well a worker can go earlier.
    """
    if not soonest.doubt or not soonest.requests:
        return settings.scale_down_headroom
    usual = max(LEAST_HEADROOM, soonest.doubt / 2 / soonest.requests)
    return min(settings.scale_down_headroom, usual)


LEAST_HEADROOM = 0.05
"""However well load is foretold: at an edge, a few per cent more of it is all between no miss and many."""


def demand_of(settings: PlannerSettings, foresight: Foresight, expected: Expected) -> Demand:
    """One expected interval as a demand: its requests, as long as recent ones, but for the expected mean."""
    assert expected.requests is not None
    return Demand(
        expected.requests / foresight.interval_s,
        _with_mean(foresight.isl, expected.isl_tokens, settings.isl_tokens),
        _with_mean(foresight.osl, expected.osl_tokens, settings.osl_tokens),
        burstiness=max(1.0, foresight.dispersion or 1.0),
    )


def _with_mean(lengths: Lengths | None, mean_tokens: float | None, unseen_tokens: float) -> Lengths:
    if lengths is None or not lengths.total or not lengths.mean_tokens:
        return Lengths.fixed(mean_tokens or unseen_tokens)
    if not mean_tokens:
        return lengths
    factor = min(max(mean_tokens / lengths.mean_tokens, 0.5), 2.0)
    bounds = tuple(factor * each for each in lengths.upper_bounds_tokens)
    return Lengths(bounds, lengths.counts, factor * lengths.mean_tokens)


def _without_failing_roles(observation: Observation, sizing: Sizing, current: Targets) -> Sizing:
    """No more workers of a role of which several failed for good."""
    targets, steps = sizing.targets, []
    for role in SCALED_ROLES:
        why = guards.against_failures(observation.fleet, role)
        if why and targets.of(role) > current.of(role):
            after = targets.plus(role, current.of(role) - targets.of(role))
            steps.append(Step("failures", targets, after, why))
            targets = after
    if not steps:
        return sizing
    return replace(sizing, targets=targets, steps=(*sizing.steps, *steps), prediction=None)
