"""The error budget: what was missed, and what is left or owed of the promise."""

from __future__ import annotations

import math
from dataclasses import astuple, replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.model import Demand, ErrorBudget, Observation, PlannerState, Sizing
from dynaplan.planner.rules.sla_policy import size_for_slo
from dynaplan.planner.sizing import error_budget
from dynaplan.planner.sizing.error_budget import (
    describe_budget,
    missed_requests,
    missed_shares,
    update_budget,
)
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from tests.unit.planner.rules import targets as situations
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import H200, kind

DISAGGREGATED = QueueingModel(kind(H200), kind(H200))
AGGREGATED = QueueingModel(kind(H200))
PROMISE = SlaTargets(500.0, 20.0)
PROMISED = 0.05
"""The part of the requests that may miss a target, by that promise."""
WINDOW_S = 3600.0
NOTHING_MISSED, EVERYTHING_MISSED = (0.0, 0.0), (1.0, 1.0)

# -- what was missed -----------------------------------------------------------------------------------------


def seen(requests_per_s: float, ttft_ms: float | None, itl_ms: float | None) -> Traffic:
    return replace(situations.traffic(requests_per_s), ttft_ms=ttft_ms, itl_ms=itl_ms)


def expected(
    requests_per_s: float, serving: PoolSizes, service: QueueingModel = DISAGGREGATED
) -> SteadyState:
    traffic = situations.traffic(requests_per_s)
    assert traffic.isl
    assert traffic.osl
    state = SteadyState(service, Demand(requests_per_s, traffic.isl, traffic.osl))
    assert state.mean_times(serving)
    return state


@pytest.mark.parametrize(
    ("service", "serving"), [(DISAGGREGATED, PoolSizes(1, 1)), (AGGREGATED, PoolSizes(0, 2))]
)
def test_where_the_means_are_the_expected_ones_so_is_what_was_missed(
    service: QueueingModel, serving: PoolSizes
) -> None:
    state = expected(14.0, serving, service)
    means = state.mean_times(serving)
    assert means
    shares = missed_shares(service, seen(14.0, means.mean_ttft_ms, means.mean_itl_ms), serving, PROMISE)
    assert shares == pytest.approx(
        (
            state.chance_of_ttft_over(PROMISE.ttft_ms, serving),
            state.decode_batch(serving.decode).chance_of_itl_over(PROMISE.itl_ms),
        )
    )


def test_the_longer_the_means_the_more_was_missed_from_nothing_to_everything() -> None:
    shares = [
        missed_shares(DISAGGREGATED, seen(10.0, 20.0 * factor, factor), PoolSizes(1, 1), PROMISE)
        for factor in (0.01, 1, 2, 5, 10, 20, 40, 80, 1000)
    ]
    assert shares[0] == pytest.approx(NOTHING_MISSED)
    assert shares[-1] == pytest.approx(EVERYTHING_MISSED)
    for part in zip(*[each for each in shares if each], strict=True):
        assert list(part) == sorted(part)


def test_a_backlog_is_everything_missed() -> None:
    """More came than could be computed: the model knows no distribution, but the mean says it all."""
    backlog = missed_shares(DISAGGREGATED, seen(100.0, 5000.0, 5.0), PoolSizes(1, 1), PROMISE)
    assert backlog
    assert backlog[0] == 1.0
    assert backlog[1] == pytest.approx(math.exp(-20.0 / 5.0))


def test_more_than_fits_that_was_answered_in_time_all_the_same_counts_by_its_mean() -> None:
    shares = missed_shares(DISAGGREGATED, seen(100.0, 100.0, 0.0), PoolSizes(1, 1), PROMISE)
    assert shares == pytest.approx((math.exp(-5.0), 0.0))


@pytest.mark.parametrize(
    ("change", "serving"),
    [
        ({"requests": None}, PoolSizes(1, 1)),
        ({"requests": 0.0}, PoolSizes(1, 1)),
        ({"isl": None}, PoolSizes(1, 1)),
        ({"osl": None}, PoolSizes(1, 1)),
        ({"ttft_ms": None}, PoolSizes(1, 1)),
        ({}, PoolSizes(0, 1)),
        ({}, PoolSizes(1, 0)),
    ],
)
def test_what_was_missed_is_not_known_without_data_or_without_workers(
    change: dict[str, float | None], serving: PoolSizes
) -> None:
    assert missed_shares(DISAGGREGATED, replace(situations.traffic(10.0), **change), serving, PROMISE) is None  # type: ignore[arg-type]


def test_an_interval_in_which_nothing_was_decoded_missed_no_itl() -> None:
    shares = missed_shares(DISAGGREGATED, seen(10.0, 100.0, None), PoolSizes(1, 1), PROMISE)
    assert shares
    assert shares[1] == 0.0


def test_what_frontends_count_is_what_was_missed_also_after_the_last_arrival() -> None:
    told = replace(seen(10.0, 5000.0, 25.0), over_ttft=((500.0, 3.0),), over_itl=((20.0, 7.0),))
    assert missed_requests(DISAGGREGATED, told, PoolSizes(1, 1), PROMISE) == (3.0, 7.0)
    silent = replace(told, requests=0.0)
    assert missed_requests(DISAGGREGATED, silent, PoolSizes(1, 1), PROMISE) == (3.0, 7.0)
    left = update_budget(ErrorBudget(), (3.0, 7.0), silent, PROMISE, WINDOW_S)
    assert (left.ttft_requests, left.itl_requests) == (-3.0, -7.0)


def test_counts_of_other_targets_are_not_taken_and_an_estimate_is() -> None:
    other = replace(seen(10.0, 5000.0, 500.0), over_ttft=((400.0, 3.0),), over_itl=((20.0, 7.0),))
    assert other.requests
    assert missed_requests(DISAGGREGATED, other, PoolSizes(1, 1), PROMISE) == pytest.approx(
        (other.requests, other.requests)
    )


# -- the budget ----------------------------------------------------------------------------------------------


def after(budget: ErrorBudget, shares: tuple[float, float] | None, requests: float) -> ErrorBudget:
    missed = (requests * shares[0], requests * shares[1]) if shares else None
    return update_budget(
        budget, missed, replace(situations.traffic(1.0), requests=requests), PROMISE, WINDOW_S
    )


def test_what_was_not_missed_is_left_and_what_was_missed_is_owed() -> None:
    assert astuple(after(ErrorBudget(), NOTHING_MISSED, 100.0)) == pytest.approx((5.0, 5.0))
    assert astuple(after(ErrorBudget(), EVERYTHING_MISSED, 100.0)) == pytest.approx((-95.0, -95.0))
    kept = after(ErrorBudget(), (PROMISED, PROMISED), 100.0)
    assert kept.ttft_requests == pytest.approx(0.0)


def test_each_target_has_a_budget_of_its_own() -> None:
    left = after(ErrorBudget(), (1.0, 0.0), 100.0)
    assert left.ttft_requests < 0 < left.itl_requests


def test_requests_that_were_not_streamed_earn_nothing() -> None:
    traffic = replace(situations.traffic(10.0), requests=100.0, first_tokens=20.0)
    left = update_budget(ErrorBudget(), (0.0, 0.0), traffic, PROMISE, WINDOW_S)
    assert left.ttft_requests == left.itl_requests == pytest.approx(PROMISED * 20)


def test_what_is_long_past_fades_whether_it_was_left_or_owed() -> None:
    budget = ErrorBudget(100.0, -100.0)
    for _ in range(360):
        budget = after(budget, None, 0.0)
    assert astuple(budget) == pytest.approx((100 / math.e, -100 / math.e))


def test_nothing_but_time_counts_where_it_is_not_known_what_was_missed() -> None:
    faded = 100.0 * math.exp(-10.0 / WINDOW_S)
    for shares, requests in ((None, 50.0), (NOTHING_MISSED, 0.0)):
        left = after(ErrorBudget(100.0, 0.0), shares, requests)
        assert astuple(left) == pytest.approx((faded, 0.0))


def test_the_budget_of_a_steady_load_without_misses_is_that_of_one_window() -> None:
    budget = ErrorBudget()
    for _ in range(5000):
        budget = after(budget, NOTHING_MISSED, 100.0)
    assert budget.ttft_requests == pytest.approx(PROMISED * 100.0 * WINDOW_S / 10.0, rel=0.01)


def test_the_words_say_what_is_left_and_what_is_owed() -> None:
    assert describe_budget(ErrorBudget(30.0, -4.0)) == (
        "error budget: 30 requests fewer than promised missed the TTFT lately, "
        "4 requests more than promised missed the ITL lately"
    )


# -- what that decides ---------------------------------------------------------------------------------------

EDGE = 16.0
"""Requests/s."""
MODEL = situations.model()
PLENTY = ErrorBudget(200.0, 200.0)


def decided(
    observation: Observation, budget: ErrorBudget, window_s: float = WINDOW_S
) -> tuple[PlannerState, Sizing]:
    settings = replace(situations.SETTINGS, slo_window_s=window_s)
    fleet = observation.fleet
    current = PoolSizes(fleet.prefill.ready, fleet.decode.ready)
    return size_for_slo(MODEL, settings, PlannerState(error_budget=budget), observation, current)


def test_a_window_of_0_has_no_budget() -> None:
    state, sizing = decided(situations.planned_interval(1, 1, [EDGE]), PLENTY, window_s=0.0)
    assert state.error_budget == PLENTY
    assert not any(step.stage == "promise" for step in sizing.steps)


def test_no_data_changes_no_budget() -> None:
    for traffic in (None, Traffic(10.0, missing="no frontend answered")):
        silent = replace(situations.planned_interval(1, 1, [EDGE]), traffic=traffic)
        assert decided(silent, PLENTY)[0].error_budget == PLENTY


def test_the_trail_says_what_is_left_of_the_promise() -> None:
    sizing = decided(situations.planned_interval(1, 1, [EDGE]), PLENTY)[1]
    assert [step.stage for step in sizing.steps][:2] == ["promise", "demand"]
    assert "fewer than promised missed the TTFT" in sizing.steps[0].why


def test_the_budget_counts_who_was_served_by_the_workers_that_there_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not by those that are asked for: they may be starting still."""
    asked: list[PoolSizes] = []

    def noted(_: QueueingModel, __: Traffic, serving: PoolSizes, ___: SlaTargets) -> tuple[float, float]:
        asked.append(serving)
        return NOTHING_MISSED

    monkeypatch.setattr(error_budget, "missed_shares", noted)
    observation = situations.planned_interval(1, 1, [EDGE])
    size_for_slo(MODEL, situations.SETTINGS, PlannerState(), observation, PoolSizes(4, 4))
    assert asked == [PoolSizes(1, 1)]
