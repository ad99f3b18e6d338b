"""Signs that the end of an interval is too far away, and how often one may be answered."""

from __future__ import annotations

import pytest

from dynaplan.core.sizing.early_signs import Signs, least_gap_s, reason, signs, smoothed_cost_s
from dynaplan.domain.planning.observation import Sample
from dynaplan.domain.planning.sizing import ErrorBudget, SlaTargets
from dynaplan.domain.planning.traffic import Traffic

PROMISED = SlaTargets(500.0, 20.0)
NO_BUDGET = ErrorBudget()


def pulls(*depths: float | None, prefill: int = 1, waiting: int = 0) -> list[Sample]:
    return [
        Sample(at_s, prefill_queue=depth, prefill_workers=prefill, waiting_requests=waiting)
        for at_s, depth in enumerate(depths)
    ]


def so_far(requests: float | None, late: float = 0.0, long: float = 0.0) -> Traffic:
    return Traffic(10.0, requests, over_ttft=((500.0, late),), over_itl=((20.0, long),))


def signs_of(samples: list[Sample], traffic: Traffic, budget: ErrorBudget = NO_BUDGET) -> Signs:
    return signs(samples, traffic, budget, PROMISED)


def test_a_prompt_waits_for_the_queue_at_the_pace_at_which_prompts_left_it() -> None:
    assert signs_of(pulls(1, 41), so_far(60)).wait_s == pytest.approx(40 / 20 * 10)
    assert signs_of(pulls(42, 2, prefill=2), so_far(60)).wait_s == 0.0


def test_prompts_that_nobody_has_computed_yet_wait_for_as_long_as_the_interval_at_least() -> None:
    assert signs_of(pulls(0, 6), so_far(5)).wait_s == pytest.approx(50.0)


def test_requests_before_an_engine_wait_where_there_is_no_prefill_queue() -> None:
    aggregated = pulls(None, prefill=0) + pulls(None, prefill=0, waiting=8)
    assert signs_of(aggregated, so_far(24)).wait_s == pytest.approx(8 / 16 * 10)


@pytest.mark.parametrize(("samples", "requests"), [(pulls(9), 9.0), (pulls(0, 9), None)])
def test_without_two_pulls_or_traffic_nothing_is_known(samples: list[Sample], requests: float | None) -> None:
    assert signs_of(samples, so_far(requests)) == Signs()


def test_what_missed_is_owed_beyond_the_promise_and_the_rest_of_the_error_budget() -> None:
    assert signs_of([], so_far(100, late=8)).owed == pytest.approx(3)
    assert signs_of([], so_far(100, late=8, long=15)).owed == pytest.approx(10)
    assert signs_of([], so_far(100, late=8), ErrorBudget(ttft_requests=2)).owed == pytest.approx(1)
    assert signs_of([], so_far(100, late=8), ErrorBudget(3, 0)).owed == 0
    assert signs_of([], so_far(100, late=0), ErrorBudget(ttft_requests=-9)).owed == pytest.approx(4)


def test_where_nobody_counts_misses_nothing_is_owed() -> None:
    assert signs_of([], Traffic(10.0, 100.0, over_ttft=((250.0, 99.0),))).owed == 0


@pytest.mark.parametrize(
    ("now", "last", "is_early"),
    [
        (Signs(wait_s=0.5), Signs(), False),
        (Signs(wait_s=0.6), Signs(), True),
        (Signs(wait_s=1.1), Signs(wait_s=0.6), False),
        (Signs(wait_s=1.2), Signs(wait_s=0.6), True),
        (Signs(owed=0.9), Signs(), False),
        (Signs(owed=1.0), Signs(), True),
        (Signs(owed=9.0), Signs(owed=5.0), False),
        (Signs(owed=10.0), Signs(owed=5.0), True),
    ],
)
def test_a_sign_calls_once_and_again_when_it_has_doubled(now: Signs, last: Signs, is_early: bool) -> None:
    assert bool(reason(now, last, PROMISED)) is is_early


def test_the_cost_of_decisions_is_smoothed_and_bounds_their_number() -> None:
    assert smoothed_cost_s(None, 0.08) == 0.08
    assert smoothed_cost_s(0.08, 0.16) == pytest.approx(0.09)
    assert least_gap_s(0.04) == pytest.approx(4.0)
