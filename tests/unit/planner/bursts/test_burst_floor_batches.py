"""Batches of requests: what the floor learns of them, and whose GPUs it exchanges."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.bursts.burst_floor import exchanged, with_learnt_floor
from dynaplan.planner.bursts.memory import BurstMemory, Standing, StandingTrial
from dynaplan.planner.model import ErrorBudget, PlannerState, Sizing, WorkerLimits
from dynaplan.planner.rules.decision import decide
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.targets import planned_interval

SERVICE = targets.model().service
LIMITS = WorkerLimits(max_gpus=8)
QUIET_PULLS = (0.0,) * 10
LATE, IN_TIME = StandingTrial(0.0, 500.0), StandingTrial()
DECODE_LACKS = Standing(1000.0, (LATE, LATE, IN_TIME), (LATE, IN_TIME, IN_TIME))
"""Of 1000 requests half were late with up to 2 prefill workers, or with one decode worker."""
OWED = ErrorBudget(itl_requests=-50)


def learnt(traffic: Traffic, before: Standing | None = None) -> Standing:
    """What the floor knows after an interval with that traffic."""
    observation = replace(planned_interval(1, 1, [1.0]), traffic=traffic)
    state = PlannerState(bursts=BurstMemory(before or Standing()))
    return with_learnt_floor(targets.SETTINGS, state, observation, SERVICE, LIMITS, Targets(1, 1))[0]


def batch(size: float, begin_s: int, *, answered: bool = True) -> Traffic:
    """The traffic of 10 s in which a batch comes within a second."""
    traffic = replace(targets.traffic(size / 10), arrivals=(*QUIET_PULLS[:begin_s], size, *QUIET_PULLS[1:]))
    traffic = replace(traffic, arrivals=traffic.arrivals[:10])
    return traffic if answered else replace(traffic, isl=None, osl=None, isl_tokens=None, osl_tokens=None)


SILENCE = replace(batch(0.0, 0, answered=False), requests=0.0)


def test_what_decodes_goes_on_in_intervals_without_requests_and_is_judged_when_it_ends() -> None:
    came = learnt(batch(600.0, 9))
    then = learnt(SILENCE, learnt(SILENCE, came))
    at_once = learnt(batch(600.0, 0))

    assert came.decode[0].late < 0.1 * came.requests
    assert then.decode[0].late > 0.5 * then.requests
    assert at_once.decode[0].late > 0.5 * at_once.requests
    assert then.decode[0].load < 1 < came.decode[0].load + came.prefill[0].load


def test_a_batch_of_which_no_answer_has_ended_is_learnt_with_the_recent_lengths() -> None:
    assert learnt(batch(600.0, 8, answered=False)) == learnt(batch(600.0, 8))


def test_where_arrivals_are_not_known_by_pull_queues_empty_without_requests() -> None:
    before = learnt(batch(600.0, 8))
    silent = learnt(replace(SILENCE, arrivals=()), before)
    assert silent.decode[0].load == 0 < silent.decode[0].late <= before.decode[0].late


def split(
    sizing: Targets,
    current: Targets,
    standing: Standing = DECODE_LACKS,
    budget: ErrorBudget = OWED,
    limits: WorkerLimits = LIMITS,
) -> Sizing:
    """What becomes of a sizing."""
    state = PlannerState(bursts=BurstMemory(standing), error_budget=budget)
    return exchanged(Sizing(sizing, ()), targets.SETTINGS, state, SERVICE, limits, current)


def test_while_the_budget_is_overspent_a_gpu_goes_to_the_role_that_lacked_it() -> None:
    after = split(Targets(7, 1), Targets(7, 1))
    assert after.targets == Targets(6, 2)
    [step] = after.steps
    assert (step.stage, step.before, step.after) == ("exchange", Targets(7, 1), Targets(6, 2))
    assert "prefill 3, decode 2, standing still, would have kept the promise lately" in step.why
    assert after.prediction is None


def test_gpus_that_the_forecast_asks_for_are_split_as_the_floor_is_and_no_other_is_added() -> None:
    assert split(Targets(7, 1), Targets(4, 1)).targets == Targets(6, 2)
    assert split(Targets(2, 1), Targets(4, 1)).targets == Targets(3, 2)
    assert split(Targets(3, 1), Targets(3, 1)).targets == Targets(3, 1)


def test_no_gpu_is_exchanged_that_the_box_has_not_or_that_a_person_holds() -> None:
    scarce = replace(LIMITS, max_gpus=4)
    assert split(Targets(3, 1), Targets(5, 1), limits=scarce).targets == Targets(2, 2)
    held = replace(LIMITS, most=Targets(9, 1))
    assert split(Targets(7, 1), Targets(7, 1), limits=held).targets == Targets(7, 1)


def test_nothing_is_exchanged_without_a_debt_or_where_the_floor_is_there_or_unknown() -> None:
    assert split(Targets(7, 1), Targets(7, 1), budget=ErrorBudget()).targets == Targets(7, 1)
    assert split(Targets(5, 3), Targets(5, 3)).targets == Targets(5, 3)
    assert split(Targets(7, 1), Targets(7, 1), standing=Standing()).targets == Targets(7, 1)


def test_a_decision_exchanges_the_worker_as_soon_as_prefill_can_spare_it() -> None:
    quiet = planned_interval(7, 1, [1.0, 1.0])
    settings = replace(targets.SETTINGS, max_gpu_budget=8)
    state = PlannerState(bursts=BurstMemory(DECODE_LACKS), error_budget=OWED, wanted=(Targets(3, 2),) * 9)
    assert decide(settings, state, quiet, targets.model())[1].desired == Targets(3, 2)
