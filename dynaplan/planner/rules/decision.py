"""The planner's decision as a function: the live planner, replay, simulation and tests call this one.

Holds are its last step, whatever the policy: bounds that a person has set. A hold goes before thresholds,
targets, minimums and guards. One that keeps or adds workers takes room in the GPU budget from the other role,
down to that role's minimum or its own hold; where even that is not enough the hold is kept and the budget is
exceeded, as ``dynaplan scale`` may. One that keeps a role small leaves its room to the other.

``preview_decision`` is an estimate of the next decision on numbers of workers that a person asked for: with
the load of the last recorded interval, spread over them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from dynaplan.config.settings.planner import NEW_DECODE_WORKER_GRACE_PERIOD, PlannerSettings
from dynaplan.contract.counts import PoolSizes, WorkerCounts
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import (
    AverageLoad,
    Decision,
    DecisionRecord,
    DecisionStep,
    Observation,
    PlannerState,
    Prediction,
    WorkerLimits,
)
from dynaplan.planner.rules import guards
from dynaplan.planner.rules.load_policy import Situation, Stage, bound, scale_down, scale_up
from dynaplan.planner.rules.option_adjustment import plan_options
from dynaplan.planner.rules.sla_policy import (
    PerformanceModel,
    add_unmanaged,
    limits_of,
    limits_with_unmanaged,
    size_for_slo,
    unmanaged_workers,
)
from dynaplan.planner.rules.tuning import tune
from dynaplan.planner.sizing.limits import fit_budget, raise_to, within_limits

OwnPolicy = Callable[[PlannerSettings, PlannerState, Observation], tuple[PlannerState, Decision]]
"""A policy of the user's: as ``decide``, without a model. Times are monotonic seconds."""

Gate = Callable[[Situation], tuple[bool, str]]
"""Tells whether the stages after it may run, and why."""


def decide(
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    model: PerformanceModel | None = None,
    own_policy: OwnPolicy | None = None,
) -> tuple[PlannerState, Decision]:
    """Return the desired numbers of workers after one adjustment interval, and the state for the next one.

    Total: any observation has a decision, and the unknown changes nothing.

    Policy ``sla``: the workers that the coming traffic needs to meet the targets. Starting workers count as
    there, so that only ``environment: virtual`` waits at the gate "pending". Removals: ``backtest_rules.py``.

    Policy ``load``: thresholds alone (``load_policy.py``), at most one worker of each role. They run only
    while no decision is being carried out (gate "pending", at most ``scaling-timeout``) and if the numbers
    of workers stayed the same all through the interval (gate "steady"). A worker leaves when the signal is
    below its lower threshold and no guard objects (``guards.py``): minimum, floor, grace (decode, 3
    intervals after an addition) and consolidation. Removing comes before adding and prefill before decode,
    so prefill gets the budget first.

    Policy ``both``: the size of policy ``sla`` is the floor. Where there are fewer workers they are added,
    and thresholds wait for the effect. Otherwise thresholds add and remove as with ``load``, any worker
    above the floor, whichever of the two added it; the targets remove none unless the GPU budget has no room
    for it beside the floor. While traffic or forecast are not known the floor is the number asked for, so
    thresholds only add.

    ``own_policy``, a function of the user's, takes the place of thresholds and targets. It is asked while no
    decision is being carried out; what it asks for is held within the GPU budget, and where it raises nothing
    changes.

    Holds of persons always come last (``apply_holds``).
    """
    noted = state.note_pending(observation.desired, observation.at_s)
    situation = Situation(settings, noted, observation, current_targets(observation))
    current, prediction = situation.current, None
    is_known, why = _is_known(situation)
    steps = [DecisionStep("known", current, current, why)]
    if is_known and (settings.waits_with_targets or own_policy):
        is_known, why = _is_settled(situation)
        steps += [DecisionStep("pending", current, current, why)]
    if is_known:
        situation, planned, prediction = _apply_policy(situation, model, own_policy)
        steps += planned
        steps += _restore_minimum(situation, steps[-1].after)
        steps += apply_holds(settings, observation, current, steps[-1].after)
    desired = steps[-1].after
    prediction = prediction if desired == situation.floor else None
    decision = Decision(current, desired, tuple(steps), prediction)
    return _next_state(situation, decision), decision


def _apply_policy(
    situation: Situation, model: PerformanceModel | None, own_policy: OwnPolicy | None
) -> tuple[Situation, list[DecisionStep], Prediction | None]:
    """Return the situation with the policy's state and floor, the steps, and the prediction, if any."""
    if own_policy:
        return _ask_own_policy(situation, own_policy)
    targets, prediction = situation.current, None
    tuning, steps = tune(situation, model)
    options, noted = plan_options(situation)
    situation = replace(situation, state=replace(situation.state, tuning=tuning, options=options))
    steps += noted
    learnt, is_disaggregated = situation.observation.learnt, situation.is_disaggregated
    if situation.settings.is_by_targets and (lacking := learnt.lacking(is_disaggregated=is_disaggregated)):
        situation = replace(situation, floor=targets)
        steps.append(DecisionStep("learning", targets, targets, lacking))
        return situation, steps + _apply_thresholds(situation, targets), None
    if situation.settings.is_by_targets:
        situation, planned, prediction = _plan_for_targets(situation, model)
        steps += planned
        targets = steps[-1].after
    if situation.settings.has_thresholds:
        steps += _apply_thresholds(situation, targets)
    return situation, steps, prediction


def _plan_for_targets(
    situation: Situation, model: PerformanceModel | None
) -> tuple[Situation, list[DecisionStep], Prediction | None]:
    """Plan for the targets; with the policy ``both`` the size is the floor, and no worker leaves here.

    Raises ValueError without a model.
    """
    current, settings = situation.current, situation.settings
    if model is None:
        raise ValueError(f"policy {settings.policy} without a model of the engines")
    asleep = _asleep(situation.observation, current)
    awake = PoolSizes(current.prefill - asleep.prefill, current.decode - asleep.decode)
    state, sizing = size_for_slo(model, settings, situation.state, situation.observation, awake)
    steps = list(sizing.steps)
    if asleep != PoolSizes():
        planned = PoolSizes(sizing.workers.prefill + asleep.prefill, sizing.workers.decode + asleep.decode)
        why = f"asleep {asleep} (`dynaplan wake`)"
        steps = [
            DecisionStep("awake", current, awake, f"planned without what sleeps: {why}"),
            *steps,
            DecisionStep("asleep", sizing.workers, planned, f"beside these stays {why}"),
        ]
        sizing = replace(sizing, workers=planned)
    if settings.policy == "both":
        limits = replace(limits_of(settings, situation.observation, current), least=sizing.workers)
        after = fit_budget(raise_to(current, sizing.workers), limits) or sizing.workers
        steps.append(DecisionStep("floor", sizing.workers, after, f"the targets need {sizing.workers}"))
    return replace(situation, state=state, floor=sizing.workers), steps, sizing.prediction


def _ask_own_policy(
    situation: Situation, own_policy: OwnPolicy
) -> tuple[Situation, list[DecisionStep], None]:
    """Return the situation with the state that the user's function returns, and the steps to its counts.

    They stay within the GPU budget. Where the function raises nothing changes.
    """
    settings, current = situation.settings, situation.current
    try:
        state, asked = own_policy(settings, situation.state, situation.observation)
        steps, desired = list(asked.steps), asked.desired
        prefill = max(0, desired.prefill) if situation.is_disaggregated else current.prefill
        desired = PoolSizes(prefill, max(0, desired.decode))
    except Exception as error:  # whatever it raises, the planner goes on
        why = f"{settings.policy} raised {type(error).__name__}: {error}: change nothing"
        return situation, [DecisionStep("own policy", current, current, why)], None
    before = steps[-1].after if steps else current
    if before != desired or not steps:
        steps.append(DecisionStep("own policy", before, desired, f"{settings.policy} asks for {desired}"))
    limits = replace(limits_of(settings, situation.observation, current), least=PoolSizes())
    _, limited = within_limits(desired, limits, current)
    return replace(situation, state=state), [*steps, *limited], None


def backtest_basis(settings: PlannerSettings, observation: Observation) -> tuple[PoolSizes, WorkerLimits]:
    """Return the workers that a backtest compares with, and the limits of what it may try.

    The workers are unmanaged ones and managed ones that are awake. Only the GPUs of sleepers are not
    available: those that leaving workers hold will be.
    """
    current = current_targets(observation)
    asleep = _asleep(observation, current)
    awake = PoolSizes(current.prefill - asleep.prefill, current.decode - asleep.decode)
    unmanaged = unmanaged_workers(observation.fleet, awake)
    limits = limits_of(settings, observation, awake)
    budget = min(settings.max_gpu_budget, observation.fleet.gpus_total or settings.max_gpu_budget)
    limits = replace(limits, max_gpus=budget - limits.gpus(asleep))
    return add_unmanaged(awake, unmanaged), limits_with_unmanaged(limits, unmanaged)


def _asleep(observation: Observation, current: PoolSizes) -> PoolSizes:
    """Return the sleeping workers that are neither planned with nor removed.

    The last worker of a role is none of them: the next request wakes it.
    """
    fleet = observation.fleet
    return PoolSizes(
        min(fleet.prefill.asleep, max(0, current.prefill - 1)),
        min(fleet.decode.asleep, max(0, current.decode - 1)),
    )


def _apply_thresholds(situation: Situation, targets: PoolSizes) -> list[DecisionStep]:
    """Run the gates, and then the threshold stages, from these targets on."""
    steps = []
    for name, gate in GATES.items():
        is_open, why = gate(situation)
        steps.append(DecisionStep(name, targets, targets, why))
        if not is_open:
            return steps
    if targets != situation.current:
        return [*steps, DecisionStep("floor raised", targets, targets, "the thresholds wait for its effect")]
    for name, stage in _stages(situation).items():
        after, why = stage(situation, targets)
        steps += [DecisionStep(name, targets, after, why), *bound(situation, targets, after)]
        targets = steps[-1].after
    return steps


def _restore_minimum(situation: Situation, targets: PoolSizes) -> list[DecisionStep]:
    """Return the step from no decode worker to the minimum, where GPUs and holds allow it; else none.

    Whatever the policy: without one nobody answers, and so nothing would ever be measured.
    """
    settings, observation = situation.settings, situation.observation
    if targets.decode or observation.fleet.decode.unmanaged:
        return []
    limits = limits_of(settings, observation, situation.current)
    after = limits.cap(replace(targets, decode=limits.least.decode))
    if after == targets or limits.gpus(after) > limits.max_gpus:
        return []
    return [
        DecisionStep(
            "minimum", targets, after, f"without a decode worker nobody answers: at least {limits.least}"
        )
    ]


def current_targets(observation: Observation) -> PoolSizes:
    """Return the desired counts, and the present workers of a role without a desired count."""
    desired, fleet = observation.desired, observation.fleet
    return PoolSizes(
        desired.num_prefill_workers if desired.num_prefill_workers >= 0 else fleet.prefill.present,
        desired.num_decode_workers if desired.num_decode_workers >= 0 else fleet.decode.present,
    )


def _next_state(situation: Situation, decision: Decision) -> PlannerState:
    """Return the next state: grace after an added decode worker, else one interval of grace less.

    Grace lasts for the documented number of intervals after the one that added a decode worker; in Dynamo it
    is one interval short. An interval that changes nothing counts too; one in which a decision was still
    being carried out does not.
    """
    state, observation = situation.state, situation.observation
    if guards.is_waiting(situation.settings, state, observation.desired, observation.at_s):
        return state
    if decision.desired.decode > decision.current.decode:
        return replace(state, decode_grace_left=NEW_DECODE_WORKER_GRACE_PERIOD)
    return state.after_interval()


def _is_known(situation: Situation) -> tuple[bool, str]:
    if situation.observation.unknown:
        return False, f"no data: change nothing, because {situation.observation.unknown}"
    return True, "the fleet and the desired counts are known"


def _is_settled(situation: Situation) -> tuple[bool, str]:
    desired, state, at_s = situation.observation.desired, situation.state, situation.observation.at_s
    if not desired.is_pending:
        return True, "no decision is being carried out"
    waited_s = at_s - state.pending_since_s
    if guards.is_waiting(situation.settings, state, desired, at_s):
        return False, f"decision {desired.decision_id} is still being carried out, for {waited_s:.0f} s now"
    return (
        True,
        f"decision {desired.decision_id} was not acknowledged for {waited_s:.0f} s: going on without it",
    )


def _is_steady(situation: Situation) -> tuple[bool, str]:
    changed = situation.observation.load.changed
    if changed:
        return False, f"the workers changed in this interval ({changed}): no adjustments will be made"
    return True, "the same workers were there all through the interval"


GATES: dict[str, Gate] = {"pending": _is_settled, "steady": _is_steady}
"""Gates before every threshold, in order; the first closed one ends the decision."""

_STAGES: dict[str, tuple[Role, Stage]] = {
    "prefill scale down": (Role.PREFILL, scale_down(Role.PREFILL)),
    "decode scale down": (Role.DECODE, scale_down(Role.DECODE)),
    "prefill scale up": (Role.PREFILL, scale_up(Role.PREFILL)),
    "decode scale up": (Role.DECODE, scale_up(Role.DECODE)),
}
"""Threshold stages in order: removing before adding, prefill before decode."""


def _stages(situation: Situation) -> dict[str, Stage]:
    return {
        name: stage
        for name, (role, stage) in _STAGES.items()
        if role is Role.DECODE or situation.is_disaggregated
    }


def apply_holds(
    settings: PlannerSettings, observation: Observation, current: PoolSizes, wanted: PoolSizes
) -> list[DecisionStep]:
    """Return the step from the ``wanted`` numbers to those within the holds; none where nothing is held.

    A deployment without prefill workers (``current`` has none) ignores a hold of them.
    """
    holds = observation.holds.beside(current)
    if not holds.by_role:
        return []
    after = _fit_holds(settings, observation, holds, current, wanted)
    return [DecisionStep("held", wanted, after, _describe_holds(holds, wanted, after))]


def _fit_holds(
    settings: PlannerSettings,
    observation: Observation,
    holds: RoleHolds,
    current: PoolSizes,
    wanted: PoolSizes,
) -> PoolSizes:
    bounded = holds.bounded(wanted)
    if not any(bounded.of(role) > wanted.of(role) for role in SCALED_ROLES):
        return bounded
    limits = limits_of(settings, observation, current)
    least = PoolSizes(min(limits.least.prefill, bounded.prefill), min(limits.least.decode, bounded.decode))
    least = holds.bounded(least)
    return fit_budget(bounded, replace(limits, least=least)) or least


def _describe_holds(holds: RoleHolds, wanted: PoolSizes, after: PoolSizes) -> str:
    parts = []
    for role in SCALED_ROLES:
        hold, before, now = holds.of(role), wanted.of(role), after.of(role)
        not_wanted = f", instead of {before}" if before != now else ""
        if hold:
            parts.append(f"{role.value} is {hold}{not_wanted}")
        elif not_wanted:
            parts.append(f"the GPU budget then has room for {role.value} {now}{not_wanted}")
    return "; ".join(parts)


def preview_decision(
    last: DecisionRecord,
    workers: PoolSizes,
    holds: RoleHolds,
    model: PerformanceModel | None,
    own_policy: OwnPolicy | None = None,
) -> Decision:
    """Return the decision that would follow ``last`` with these numbers of workers, all of them ready."""
    seen = last.observation
    fleet = replace(
        seen.fleet,
        prefill=_ready(seen.fleet.prefill, workers.prefill),
        decode=_ready(seen.fleet.decode, workers.decode),
    )
    observation = replace(
        seen,
        at_s=seen.at_s + last.settings.adjustment_interval_s,
        fleet=fleet,
        desired=DesiredCounts(workers.prefill, workers.decode, 0, 0),
        load=_spread_load(seen.load, workers),
        failure="",
        holds=holds,
    )
    return decide(last.settings, last.next_state, observation, model, own_policy)[1]


def has_data(observation: Observation) -> bool:
    """Tell whether fleet and traffic were known in that interval, as far as the policy asks for them."""
    traffic = observation.traffic
    return not observation.unknown and (traffic is None or traffic.requests is not None)


def _ready(counts: WorkerCounts, workers: int) -> WorkerCounts:
    return WorkerCounts(ready=workers, gpus=counts.gpus, startup_s=counts.startup_s)


def _spread_load(load: AverageLoad, workers: PoolSizes) -> AverageLoad:
    """Return the same load over these workers; the prefill queue is that of all of them already."""
    usage = load.kv_usage
    if usage is not None and workers.decode:
        usage = usage * load.decode_workers / workers.decode
    return replace(
        load,
        kv_usage=usage,
        prefill_workers=workers.prefill,
        decode_workers=workers.decode,
        changed="",
    )
