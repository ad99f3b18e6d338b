"""The learnt floor within a decision."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.bursts.burst_floor import with_learnt_floor
from dynaplan.planner.bursts.memory import BurstMemory, Standing
from dynaplan.planner.model import ErrorBudget, PlannerState, Step, WorkerLimits
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.targets import planned_interval

ON = replace(targets.SETTINGS, learnt_floor=True)
SERVICE = targets.model().service
LIMITS = WorkerLimits()
NOTHING_OWED, ONE_EACH = ErrorBudget(), Targets(1, 1)
BURST = (0.0,) * 5 + (60.0,) * 5


def seen(arrivals: tuple[float, ...] = BURST) -> Traffic:
    """The traffic of an interval of 10 s with these arrivals, one number each second."""
    return replace(targets.traffic(sum(arrivals) / 10.0), arrivals=arrivals)


def floor_after(
    traffic: Traffic | None,
    before: Standing | None = None,
    settings: PlannerSettings = ON,
    limits: WorkerLimits = LIMITS,
    service: ServiceModel = SERVICE,
    budget: ErrorBudget = NOTHING_OWED,
    current: Targets = ONE_EACH,
) -> tuple[Standing, WorkerLimits, list[Step]]:
    """The trials, the limits and the steps after an interval with that traffic."""
    state = PlannerState(bursts=BurstMemory(before or Standing()), error_budget=budget)
    observation = replace(planned_interval(1, 1, [1.0]), traffic=traffic)
    return with_learnt_floor(settings, state, observation, service, limits, current)


def test_a_burst_raises_the_minimums_of_the_decisions_after_it() -> None:
    standing, limits, [step] = floor_after(seen())

    assert standing.requests == 300
    assert limits.least.prefill >= 3
    assert "standing still, would have kept the promise" in step.why


def test_it_only_learns_unless_it_is_switched_on_and_not_even_that_without_a_window() -> None:
    standing, limits, steps = floor_after(seen(), settings=targets.SETTINGS)
    assert (standing.requests, limits, steps) == (300, LIMITS, [])
    assert floor_after(seen(), settings=replace(ON, slo_window_s=0.0)) == (Standing(), LIMITS, [])


@pytest.mark.parametrize("budget", [ErrorBudget(ttft_requests=-2), ErrorBudget(itl_requests=-2)])
def test_an_overspent_error_budget_holds_what_would_have_kept_the_promise(budget: ErrorBudget) -> None:
    _, limits, [step] = floor_after(seen(), settings=targets.SETTINGS, budget=budget, current=Targets(6, 3))
    assert 3 <= limits.least.prefill < 6
    assert limits.least.decode < 3
    assert "the error budget is overspent, no worker leaves below prefill" in step.why


def test_an_error_budget_that_has_been_kept_for_a_window_holds_nothing() -> None:
    kept = ErrorBudget(ttft_requests=-2, kept_s=targets.SETTINGS.slo_window_s + 1)
    _, limits, steps = floor_after(seen(), settings=targets.SETTINGS, budget=kept, current=Targets(6, 3))
    assert (limits, steps) == (LIMITS, [])


def test_an_overspent_error_budget_adds_no_worker() -> None:
    owed = ErrorBudget(ttft_requests=-2)
    _, limits, _ = floor_after(seen(), settings=targets.SETTINGS, budget=owed, current=Targets(2, 1))
    assert limits.least == Targets(2, 1)


@pytest.mark.parametrize("hedge", [False, True])
def test_workers_that_a_quiet_interval_would_remove_stay_until_the_debt_is_paid(hedge: bool) -> None:
    learnt = floor_after(seen())[0]
    wanted = (Targets(1, 1),) * 9
    quiet = planned_interval(5, 1, [1.0, 1.0])

    def left(budget: ErrorBudget) -> int:
        state = PlannerState(bursts=BurstMemory(learnt), error_budget=budget, wanted=wanted)
        settings = replace(targets.SETTINGS, hedge=hedge)
        return decide(settings, state, quiet, targets.model())[1].desired.prefill

    assert left(ErrorBudget(50, 50)) < 3 <= left(ErrorBudget(-50, 50)) < 5


def test_without_data_what_was_learnt_stays_and_without_requests_the_queues_empty() -> None:
    learnt = floor_after(seen())[0]
    no_pulls = replace(seen(), arrivals=())
    for unknown in (None, Traffic(10.0, missing="no frontend answered"), no_pulls):
        assert floor_after(unknown, learnt)[0] == learnt
    silent = floor_after(targets.traffic(0.0), learnt)[0]
    assert silent.prefill[0].load == 0 < silent.prefill[0].late < learnt.prefill[0].late
    assert silent.requests < learnt.requests


def test_an_interval_in_which_nothing_was_answered_is_learnt_from_with_the_recent_lengths() -> None:
    """On too few workers a burst may pass without an answer: lengths are known of answered requests only."""
    unanswered = replace(seen(), isl=None, osl=None, isl_tokens=None, osl_tokens=None)
    assert floor_after(unanswered)[0].requests == 300
    assert floor_after(unanswered)[1].least.prefill >= 3


def test_nothing_learnt_and_what_the_minimums_hold_already_are_said() -> None:
    assert floor_after(None)[2][0].why == "nothing learnt: the minimums stay"
    calm = floor_after(seen((1.0,) * 10))[2][0].why
    assert calm.endswith("would have kept the promise lately: the minimums stay")


def test_a_floor_that_does_not_fit_beside_the_minimums_changes_nothing() -> None:
    limits = WorkerLimits(max_gpus=4, least=Targets(1, 3))
    _, after, [step] = floor_after(seen(), limits=limits)

    assert after == limits
    assert step.why.endswith("the minimums stay")


def test_an_aggregated_service_has_the_larger_of_both_numbers() -> None:
    limits = WorkerLimits(least=Targets(0, 1))
    _, after, _ = floor_after(seen(), limits=limits, service=replace(SERVICE, prefill=None))

    assert after.least.prefill == 0
    assert after.least.decode >= 3


def test_a_decision_keeps_to_the_floor_and_its_state_can_be_written_down() -> None:
    observation = replace(planned_interval(1, 1, [1.0, 1.0, 1.0]), traffic=seen())
    state, decision = decide(ON, PlannerState(), observation, targets.model())

    assert decision.desired.prefill >= 3
    assert any(step.stage == "learnt floor" for step in decision.steps)
    assert (
        PlannerState.from_json(json.loads(json.dumps({**state.to_json(), **asdict(state.bursts)}))) == state
    )
    assert Traffic.from_json(json.loads(json.dumps(asdict(seen())))) == seen()
