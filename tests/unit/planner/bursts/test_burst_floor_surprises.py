"""Workers stay that a load beyond its forecast may want back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.bursts.burst_floor import kept_for_surprises
from dynaplan.planner.bursts.memory import BurstMemory, Standing, StandingTrial
from dynaplan.planner.model import Demand, PlannerState, Sizing, WorkerLimits
from dynaplan.planner.rules.decision import decide
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.targets import planned_interval

SERVICE = targets.model().service
PROMISE = SlaTargets(500.0, 20.0)
LIMITS = WorkerLimits(max_gpus=16)
LATE, IN_TIME = StandingTrial(0.0, 500.0), StandingTrial()
BURSTS = Standing(1000.0, (LATE, LATE, IN_TIME), (LATE, IN_TIME, IN_TIME))
"""Of 1000 requests half were late with up to 2 prefill workers, or with one decode worker."""

QUIET, MANY = Sizing(Targets(1, 1), ()), Targets(6, 6)


def demand(requests_per_s: float) -> Demand:
    lengths = targets.planned_interval(1, 1, [1.0]).foresight
    assert lengths and lengths.isl and lengths.osl
    return Demand(requests_per_s, lengths.isl, lengths.osl)


def kept(
    requests_per_s: float | None = 1000.0,
    sizing: Sizing = QUIET,
    standing: Standing = BURSTS,
    limits: WorkerLimits = LIMITS,
    current: Targets = MANY,
    is_aggregated: bool = False,
) -> Sizing:
    """What is kept when so many requests/s may come as a surprise."""
    service = replace(SERVICE, prefill=None) if is_aggregated else SERVICE
    surprised = None if requests_per_s is None else demand(requests_per_s)
    return kept_for_surprises(sizing, surprised, standing, service, PROMISE, limits, current)


def test_workers_stay_that_standing_still_would_have_kept_the_promise() -> None:
    after = kept()
    assert after.targets == Targets(3, 2)
    [step] = after.steps
    assert (step.stage, step.before, step.after) == ("surprises", Targets(1, 1), Targets(3, 2))
    assert "no worker leaves below prefill 3, decode 2: the load may exceed its forecast" in step.why
    assert "reach 1000.0 requests/s" in step.why
    assert after.prediction is None


def test_a_load_that_keeps_to_its_forecast_lets_them_go() -> None:
    assert kept(requests_per_s=0.01) is QUIET


def test_no_worker_is_added() -> None:
    assert kept(current=Targets(2, 1)).targets == Targets(2, 1)
    growing = Sizing(Targets(7, 7), ())
    assert kept(sizing=growing) is growing


def test_one_role_may_grow_while_the_other_keeps_its_workers() -> None:
    assert kept(sizing=Sizing(Targets(7, 1), ())).targets == Targets(7, 2)


def test_nothing_stays_where_no_surprise_is_known_or_nothing_was_learnt() -> None:
    assert kept(requests_per_s=None) is QUIET
    assert kept(standing=Standing()) is QUIET


def test_what_does_not_fit_beside_a_role_that_grows_does_not_stay() -> None:
    growing = Sizing(Targets(4, 1), ())
    limits = replace(LIMITS, max_gpus=5)
    assert kept(sizing=growing, current=Targets(3, 2), limits=limits) is growing


def test_a_person_may_hold_fewer() -> None:
    assert kept(limits=replace(LIMITS, most=Targets(2, 9))).targets == Targets(2, 2)


def test_an_aggregated_service_keeps_the_larger_of_both_numbers() -> None:
    quiet = Sizing(Targets(0, 1), ())
    assert kept(sizing=quiet, current=Targets(0, 6), is_aggregated=True).targets == Targets(0, 3)


@pytest.mark.parametrize(
    ("surprise", "window_s", "least"), [(0.0, 3600.0, 1), (5000.0, 3600.0, 3), (5000.0, 0.0, 1)]
)
def test_in_a_decision_it_is_the_surprise_of_the_farthest_forecast(
    surprise: float, window_s: float, least: int
) -> None:
    quiet = planned_interval(6, 2, [1.0, 1.0])
    assert quiet.foresight
    near, far = quiet.foresight.expected
    expected = (near, replace(far, surprise=surprise))
    observation = replace(quiet, foresight=replace(quiet.foresight, expected=expected))
    settings = replace(targets.SETTINGS, slo_window_s=window_s)
    state = PlannerState(bursts=BurstMemory(BURSTS), wanted=(Targets(1, 1),) * 9)
    desired = decide(settings, state, observation, targets.model())[1].desired
    assert desired.of(Role.PREFILL) == least
