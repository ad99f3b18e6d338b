"""What the planner sets of running workers besides their number, by the same model that counts them.

Each setting is live: frontends follow it, and no worker is started again. While traffic is not known the last
one stays. While the engines' steps are not known yet only a number of requests that a person named is set.
"""

from __future__ import annotations

from dataclasses import replace

from dynaplan.config.settings.fields import OFF
from dynaplan.config.settings.planner import AUTO, PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.planner.model import DecisionStep, Tuning
from dynaplan.planner.rules.load_policy import Situation
from dynaplan.planner.rules.option_adjustment import ENGINE_OPTION
from dynaplan.planner.rules.sla_policy import PerformanceModel, apply_corrections
from dynaplan.planner.sizing.demand_forecast import demand_of
from dynaplan.planner.sizing.local_prefill import LocalPrefill, longest_local
from dynaplan.planner.sizing.queueing.queueing_model import SteadyState
from dynaplan.planner.sizing.running_limit import FullWorker, limit_of, most_running

RUNNING_LIMIT, LOCAL_PREFILL = "running limit", "local prefill"
TUNING_STAGES = (RUNNING_LIMIT, LOCAL_PREFILL, ENGINE_OPTION)
"""The stages of a decision's trail that set something besides numbers of workers."""


def tune(situation: Situation, model: PerformanceModel | None) -> tuple[Tuning, list[DecisionStep]]:
    """Return the limits to apply to running workers from now on, and the steps that say why."""
    settings, learnt, current = situation.settings, situation.observation.learnt, situation.current
    if not settings.tuned or model is None:
        return Tuning(), []
    if learnt.lacking(is_disaggregated=situation.is_disaggregated):
        return _without_model(situation)
    steady = _present(situation, model)
    if steady is None:
        return situation.state.tuning, []
    tuning, steps = Tuning(), []
    if settings.max_running_requests != OFF:
        limit, why = _running_limit(settings, steady, current)
        tuning = replace(tuning, running_limit=limit)
        steps.append(DecisionStep(RUNNING_LIMIT, current, current, why))
    if settings.max_local_prefill_length != OFF and not steady.is_aggregated:
        local, why = _local_prefill(settings, steady, current)
        tuning = replace(
            tuning, max_local_prefill_tokens=local.most_tokens, max_local_running=local.most_running
        )
        steps.append(DecisionStep(LOCAL_PREFILL, current, current, why))
    return tuning, steps


def _without_model(situation: Situation) -> tuple[Tuning, list[DecisionStep]]:
    """Return the limit of running requests that a person named, if one did, by measured times alone.

    Others wait for half of the TTFT target at most, and a request holds its place for as long as one took
    lately.
    """
    settings, traffic, current = situation.settings, situation.observation.traffic, situation.current
    asked = settings.max_running_requests
    if not isinstance(asked, int):
        return Tuning(), []
    if traffic is None or not traffic.duration_ms:
        return situation.state.tuning, []
    limit = RunningLimit(asked, settings.ttft_ms / 2000, 1000 * asked / traffic.duration_ms)
    why = f"{asked} at once on a worker, as asked for; others wait half of the TTFT target at most"
    return Tuning(limit), [DecisionStep(RUNNING_LIMIT, current, current, why)]


def _present(situation: Situation, model: PerformanceModel) -> SteadyState | None:
    """Return the steady state under the demand of the next interval; None where no forecast is known."""
    observation, foresight = situation.observation, situation.observation.foresight
    soonest = foresight.expected[0] if foresight and foresight.expected else None
    if foresight is None or soonest is None or soonest.requests is None:
        return None
    learnt = model.with_learnt(observation.learnt)
    service = apply_corrections(learnt, situation.state.corrections, situation.current)
    return SteadyState(service, demand_of(situation.settings, foresight, soonest))


def _running_limit(
    settings: PlannerSettings, steady: SteadyState, workers: PoolSizes
) -> tuple[RunningLimit | None, str]:
    targets, asked = settings.targets(), settings.max_running_requests
    slots = steady.service.decode.settings.request_slots
    most = most_running(steady, targets.itl_ms) if asked == AUTO else int(asked)
    if most < 1:
        alone_ms = FullWorker(steady, 1).step_ms
        return None, f"none: a request alone has an ITL of {alone_ms:.3g} ms, above {targets.itl_ms:g} ms"
    if most >= slots and asked == AUTO:
        return None, f"none: all {slots} slots of a worker keep ITL {targets.itl_ms:g} ms"
    limit = limit_of(steady, most, targets, workers)
    step_ms, ends = FullWorker(steady, most).step_ms, limit.ends_per_s * limit.wait_s
    at_prefill = f", and {limit.most - most} whose prompt is computed elsewhere" if limit.most > most else ""
    why = (
        f"{most} at once on a worker, {step_ms:.3g} ms a token{at_prefill}; "
        f"others wait {limit.wait_s:.2g} s at most, in which a worker ends {ends:.2g}"
    )
    return limit, why


def _local_prefill(
    settings: PlannerSettings, steady: SteadyState, workers: PoolSizes
) -> tuple[LocalPrefill, str]:
    found = longest_local(steady, settings.targets(), workers)
    if not found.most_tokens:
        return found, "no prompt: it would break the ITL, or come later than by a prefill worker"
    return found, (
        f"prompts of up to {found.most_tokens} tokens to compute, while no more than {found.most_running} "
        f"requests run there: {found.local_ms:.0f} ms, {found.remote_ms:.0f} ms by way of a prefill worker"
    )
