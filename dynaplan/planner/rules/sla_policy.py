"""The SLA policy: sizes the worker pools so that the forecast traffic meets the latency targets.

Each interval, in this order:

1. *Error budget*: requests of the finished interval that missed a target are charged to it
   (``planner/sizing/error_budget.py``).
2. *Learnt*: where the engines' own counters tell the time of a step, and there is no profile or one that
   foretells clearly worse, the model has those times. Else *corrections*: the profile's times the factors
   of the last backtest (``planner/backtesting/record.py``), which fits none with ``no-correction``.
3. *Demands*: one per forecast interval, and one more with the backlog (``look_ahead.py``).
4. *Size*: the most that any of them needs, by the queueing model (``pool_sizes.py``), within minimums and GPU
   budget (``limits.py``).
5. *Backtest*: scale down only if a simulation of the last traffic meets the targets with fewer workers. Where
   the present load was simulated, the result overrides the forecast (``backtest_rules.py``,
   ``planner/backtesting``).
6. *Failures*: no workers are added to a role in which several have failed permanently.
7. *Unmanaged* workers, which somebody else starts and stops, serve traffic too: they were added before
   sizing, and are subtracted from the size.

With ``sizing: formula`` steps 3 to 5 are left out, as in the original: the mean forecast for the next
interval gives the size, for scaling up and down, within minimums and GPU budget. Its corrections are of the
interval, unless worker counts changed in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.model import (
    UNLIMITED,
    Corrections,
    DecisionStep,
    Demand,
    Observation,
    PlannerState,
    Sizing,
    TrafficForecast,
    WorkerLimits,
)
from dynaplan.planner.rules import guards
from dynaplan.planner.rules.backtest_rules import apply_backtest
from dynaplan.planner.sizing import error_budget
from dynaplan.planner.sizing.demand_forecast import demand_of
from dynaplan.planner.sizing.error_budget import describe_budget
from dynaplan.planner.sizing.formula import Formula
from dynaplan.planner.sizing.look_ahead import backlog_demand, size_for_all
from dynaplan.planner.sizing.pool_sizes import size_pools
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel


@dataclass(frozen=True)
class PerformanceModel:
    """The queueing model of the engines, and, with ``sizing: formula``, the formulas.

    ``profile_note`` says that the profile is an estimate; empty for a measured one.
    """

    service: QueueingModel
    formula: Formula | None = None
    profile_note: str = ""

    def with_learnt(self, learnt: LearntTimings) -> PerformanceModel:
        """Return the model with what was learnt in the profile's place, of each role where that counts."""
        if self.formula:
            return self  # its tables are the profile's
        service = self.service
        prefill = service.prefill
        if learnt.counts(Role.PREFILL) and prefill and learnt.prefill:
            prefill = prefill.with_learnt(learnt.prefill, takes_sizes=learnt.is_needed)
        decode = service.decode
        if learnt.counts(Role.DECODE) and learnt.decode:
            decode = decode.with_learnt(learnt.decode, takes_sizes=learnt.is_needed)
        if decode is service.decode and prefill is service.prefill:
            return self
        return replace(self, service=replace(service, decode=decode, prefill=prefill), profile_note="")

    def service_for(self, current: PoolSizes) -> QueueingModel:
        """Return the queueing model, without its prefill stage if there is no prefill pool."""
        return self.service if current.prefill else replace(self.service, prefill=None)


def size_for_slo(
    model: PerformanceModel,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    current: PoolSizes,
) -> tuple[PlannerState, Sizing]:
    """Return the next state, and the workers that the coming traffic needs within every limit.

    Without traffic data or a forecast nothing changes.
    """
    unmanaged = unmanaged_workers(observation.fleet, current)
    limits = limits_with_unmanaged(limits_of(settings, observation, current), unmanaged)
    current = add_unmanaged(current, unmanaged)
    learnt = observation.learnt
    model = model.with_learnt(learnt)
    state = _spend_error_budget(model, settings, state, observation, current)
    notes: list[DecisionStep] = []
    if model.formula:
        state, notes = _update_corrections(model.formula, settings, state, observation, current)
    else:
        state = replace(state, corrections=_refitted(state.corrections, observation))
        if any(map(learnt.counts, SCALED_ROLES)):
            lines = learnt.lines(is_disaggregated=bool(current.prefill))
            notes = [DecisionStep("learnt", current, current, line) for line in lines]
    if settings.slo_window_s:
        notes = [DecisionStep("promise", current, current, describe_budget(state.error_budget)), *notes]
    if model.profile_note:
        notes = [DecisionStep("profile", current, current, model.profile_note), *notes]
    service = apply_corrections(model, state.corrections, current)
    foresight, traffic = observation.foresight, observation.traffic
    is_measured = traffic is None or traffic.requests is not None
    if foresight is None or not foresight.expected or not is_measured:
        missing = traffic.missing if traffic else ""
        why = f"no data: change nothing, because {missing or 'no traffic was seen yet'}"
        steps = (*notes, DecisionStep("demand", current, current, why))
        return state, subtract_unmanaged(Sizing(current, steps), unmanaged)
    if model.formula:
        expected, targets = foresight.expected[0], settings.targets()
        sizing = model.formula.size(
            expected, foresight.interval_s, targets, state.corrections, limits, current
        )
    else:
        sizing = _size_by_queueing_model(service, settings, observation, foresight, limits, current)
        sizing = apply_backtest(sizing, observation, limits, current)
    sizing = _block_scale_up_of_failing_roles(observation, sizing, current)
    return state, subtract_unmanaged(replace(sizing, steps=(*notes, *sizing.steps)), unmanaged)


def limits_of(settings: PlannerSettings, observation: Observation, current: PoolSizes) -> WorkerLimits:
    """Return the GPU budget, the minimums, and the maximums of the holds (``decision.py``).

    GPUs of draining workers, and of workers beyond the desired number, are not available yet. The budget is
    at least the GPUs of the workers already requested, but never above ``max-gpu-budget`` or the box.
    """
    fleet = observation.fleet
    budget = min(settings.max_gpu_budget, fleet.gpus_total or settings.max_gpu_budget)
    held = guards.gpus_in_use(settings, fleet, current, current)
    gpus = {role: guards.gpus_of(settings, fleet, role) for role in SCALED_ROLES}
    asked = sum(current.of(role) * gpus[role] for role in SCALED_ROLES)
    least = {role: guards.min_workers(settings, gpus[role]) for role in SCALED_ROLES}
    return WorkerLimits(
        max_gpus=max(budget - (held - asked), min(asked, budget)),
        prefill_gpus=gpus[Role.PREFILL],
        decode_gpus=gpus[Role.DECODE],
        least=PoolSizes(least[Role.PREFILL] if current.prefill else 0, least[Role.DECODE]),
        most=observation.holds.beside(current).bounded(UNLIMITED),
    )


def _refitted(before: Corrections, observation: Observation) -> Corrections:
    """Return the factors of the last backtest, and 1 for a role whose steps were learnt."""
    answer, learnt = observation.backtest, observation.learnt
    found = answer.corrections if answer and answer.workers else before
    return Corrections(
        1.0 if learnt.counts(Role.PREFILL) else found.prefill,
        1.0 if learnt.counts(Role.DECODE) else found.decode,
    )


def _update_corrections(
    formula: Formula,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    current: PoolSizes,
) -> tuple[PlannerState, list[DecisionStep]]:
    traffic, load = observation.traffic, observation.load
    if settings.no_correction or traffic is None:
        return state, []
    if load.changed:
        why = f"corrections stay: the workers changed in this interval ({load.changed})"
        return state, [DecisionStep("corrections", current, current, why)]
    after, why = formula.corrections(
        state.corrections, traffic, load.decode_workers, is_aggregated=not current.prefill
    )
    return replace(state, corrections=after), [DecisionStep("corrections", current, current, why)]


def _spend_error_budget(
    model: PerformanceModel,
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    current: PoolSizes,
) -> PlannerState:
    """Return the state with the error budget after the misses of the finished interval.

    Without traffic data, or with a window of 0, it stays as it is.
    """
    traffic, load, targets = observation.traffic, observation.load, settings.targets()
    if traffic is None or traffic.requests is None or not settings.slo_window_s:
        return state
    serving = PoolSizes(load.prefill_workers, load.decode_workers)
    missed = error_budget.missed_requests(model.service_for(current), traffic, serving, targets)
    after = error_budget.update_budget(state.error_budget, missed, traffic, targets, settings.slo_window_s)
    return replace(state, error_budget=after)


def apply_corrections(model: PerformanceModel, corrections: Corrections, current: PoolSizes) -> QueueingModel:
    """Return the queueing model with its step times scaled by the corrections."""
    return model.service_for(current).slowed(corrections.prefill, corrections.decode)


def _size_by_queueing_model(
    service: QueueingModel,
    settings: PlannerSettings,
    observation: Observation,
    foresight: TrafficForecast,
    limits: WorkerLimits,
    current: PoolSizes,
) -> Sizing:
    """Size by the queueing model: forecast demands, the measured one where it is above them, and backlog."""
    demands = [
        demand_of(settings, foresight, expected)
        for expected in foresight.expected
        if expected.requests is not None
    ]
    now = _measured_demand(settings, foresight, observation)
    if demands:
        if now and now.requests_per_s > demands[0].requests_per_s:
            demands.insert(0, now)
        backlog = backlog_demand(service, demands, observation, settings.adjustment_interval_s)
        demands += [backlog] if backlog else []
    targets = settings.targets()

    def size(demand: Demand, bounds: WorkerLimits) -> Sizing:
        return size_pools(service, demand, targets, bounds, current)

    return size_for_all(size, demands, current, limits)


def _measured_demand(
    settings: PlannerSettings, foresight: TrafficForecast, observation: Observation
) -> Demand | None:
    """Return the demand of the finished interval, with the forecast lengths; None where unknown or 0."""
    traffic = observation.traffic
    if traffic is None or not traffic.requests:
        return None
    measured = replace(
        foresight.expected[0], requests=traffic.requests * foresight.interval_s / traffic.interval_s
    )
    return demand_of(settings, foresight, measured)


def _block_scale_up_of_failing_roles(observation: Observation, sizing: Sizing, current: PoolSizes) -> Sizing:
    """Add no worker to a role in which several have failed permanently."""
    targets, steps = sizing.workers, []
    for role in SCALED_ROLES:
        why = guards.failure_reason(observation.fleet, role)
        if why and targets.of(role) > current.of(role):
            after = targets.plus(role, current.of(role) - targets.of(role))
            steps.append(DecisionStep("failures", targets, after, why))
            targets = after
    if not steps:
        return sizing
    return replace(sizing, workers=targets, steps=(*sizing.steps, *steps), predict=None)


NO_WORKERS = PoolSizes()


def unmanaged_workers(fleet: FleetCounts, current: PoolSizes) -> PoolSizes:
    """Return the unmanaged workers; those of prefill count only where prefill is a pool of its own."""
    return PoolSizes(fleet.prefill.unmanaged if current.prefill else 0, fleet.decode.unmanaged)


def add_unmanaged(managed: PoolSizes, unmanaged: PoolSizes) -> PoolSizes:
    """Return the numbers of managed and unmanaged workers together."""
    return PoolSizes(managed.prefill + unmanaged.prefill, managed.decode + unmanaged.decode)


def limits_with_unmanaged(limits: WorkerLimits, unmanaged: PoolSizes) -> WorkerLimits:
    """Widen the limits of the managed workers by the unmanaged ones."""
    if unmanaged == NO_WORKERS:
        return limits
    return replace(
        limits,
        max_gpus=limits.max_gpus + limits.gpus(unmanaged),
        least=add_unmanaged(limits.least, unmanaged),
        most=add_unmanaged(limits.most, unmanaged),
    )


def subtract_unmanaged(sizing: Sizing, unmanaged: PoolSizes) -> Sizing:
    """Return the size, and its steps, in managed workers, with a last step that says so."""
    if unmanaged == NO_WORKERS:
        return sizing
    steps = [
        replace(step, before=_subtract(step.before, unmanaged), after=_subtract(step.after, unmanaged))
        for step in sizing.steps
    ]
    targets = _subtract(sizing.workers, unmanaged)
    why = f"unmanaged workers serve too ({unmanaged}): {add_unmanaged(targets, unmanaged)} in all"
    return replace(sizing, workers=targets, steps=(*steps, DecisionStep("unmanaged", targets, targets, why)))


def _subtract(workers: PoolSizes, unmanaged: PoolSizes) -> PoolSizes:
    return PoolSizes(max(0, workers.prefill - unmanaged.prefill), max(0, workers.decode - unmanaged.decode))
