"""Which forecasts a decision needs, and what is believed of their answers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from dynaplan.config.settings.planner import Forecast, PlannerSettings
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.forecasting.traffic_history import TrafficHistory
from dynaplan.planner.model import Expected
from dynaplan.planner.sizing.demand_forecast import ForecastQuery, build_foresight, forecast_queries

INTERVAL_S = 30.0
WINDOW_S = 3600.0
SETTINGS = PlannerSettings(slo_window_s=WINDOW_S)
MIXED = Lengths((0.0, 1000.0, 2000.0), (0.0, 50.0, 50.0, 0.0), 1000.0)
"""Half of them short, half of them long: a standard deviation of about 550 tokens."""


def history(isl: Lengths | None = MIXED, osl: Lengths | None = None) -> TrafficHistory:
    kept = TrafficHistory(INTERVAL_S)
    kept.add(Traffic(INTERVAL_S, 100.0, 1000.0, 100.0, isl=isl, osl=osl, dispersion=2.0))
    return kept


def told(
    value: float,
    is_known: bool = True,
) -> Forecast:
    return Forecast(value, "constant", "told by the test", is_known)


def answered(
    requests: Forecast, isl: Forecast, osl: Forecast, startup_s: float = 0.0
) -> Mapping[ForecastQuery, Forecast]:
    answers = {"requests": requests, "isl_tokens": isl, "osl_tokens": osl}
    return {asked: answers[asked.curve] for asked in forecast_queries(startup_s, INTERVAL_S)}


def expected(
    requests: Forecast, isl: Forecast, kept: TrafficHistory | None = None, startup_s: float = 0.0
) -> tuple[Expected, ...]:
    return build_foresight(
        kept or history(), answered(requests, isl, told(100.0), startup_s), SETTINGS
    ).expected


def test_numbers_of_requests_are_counts_and_lengths_are_none() -> None:
    assert {each.curve for each in forecast_queries(60.0, 30.0) if each.is_count} == {"requests"}
    assert {each.curve for each in forecast_queries(60.0, 30.0) if not each.is_count} == {
        "isl_tokens",
        "osl_tokens",
    }


def test_each_interval_that_was_asked_for_is_expected_the_soonest_first() -> None:
    requests = told(80.0)
    seen = expected(requests, told(1000.0), startup_s=60.0)
    assert [each.ahead for each in seen] == [1, 2, 3]
    assert {(each.requests, each.why) for each in seen} == {(80.0, "told by the test")}


def test_what_was_seen_of_the_requests_goes_along() -> None:
    kept = history()
    seen = build_foresight(kept, answered(told(90.0), told(1000.0), told(100.0)), SETTINGS)
    assert (seen.interval_s, seen.isl, seen.osl, seen.dispersion) == (INTERVAL_S, MIXED, None, 2.0)


def test_what_is_not_known_is_not_expected_to_be_nothing() -> None:
    seen = expected(told(0.0, is_known=False), told(0.0, is_known=False))
    assert (seen[0].requests, seen[0].isl_tokens) == (None, None)


@pytest.mark.parametrize("off", [-40.0, -1.0, 0.0, 1.0, 40.0])
def test_a_length_within_the_standard_error_of_the_recent_mean_is_that_mean(off: float) -> None:
    """Of 100 requests that vary by 550 tokens the mean is known to within 55."""
    assert expected(told(100.0), told(1000.0 + off))[0].isl_tokens == pytest.approx(1000.0)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_a_length_that_is_further_off_counts_as_far_as_it_is(sign: float) -> None:
    near, far = (expected(told(100.0), told(1000.0 + sign * off))[0].isl_tokens for off in (200.0, 500.0))
    assert near is not None
    assert far is not None
    assert far - near == pytest.approx(sign * 300.0)
    assert 1000.0 + sign * 200.0 - near == pytest.approx(sign * 55.0, abs=3.0)


def test_the_more_requests_the_more_of_a_forecast_of_their_length_is_believed() -> None:
    believed = [expected(told(each), told(1300.0))[0].isl_tokens for each in (0.0, 1.0, 10.0, 1e2, 1e4, 1e8)]
    assert believed[:3] == pytest.approx([1000.0, 1000.0, believed[2]])
    assert believed == sorted(believed, key=lambda each: each or 0.0)
    assert believed[-1] == pytest.approx(1300.0, abs=0.1)


def test_the_soonest_interval_says_how_many_requests_there_are() -> None:
    answers = dict(answered(told(1e8), told(1300.0), told(100.0), 60.0))
    answers[ForecastQuery("requests", 3)] = told(1.0)
    lengths = [each.isl_tokens for each in build_foresight(history(), answers, SETTINGS).expected]
    assert lengths == pytest.approx([1300.0] * 3, abs=0.1)


def test_a_length_is_believed_as_foretold_where_no_histogram_tells_how_much_lengths_vary() -> None:
    for nothing in (None, Lengths((), ())):
        assert expected(told(1.0), told(1234.0), history(nothing))[0].isl_tokens == 1234.0


def test_requests_that_are_all_of_one_length_leave_nothing_to_chance() -> None:
    fixed = history(Lengths.fixed(1000.0))
    assert expected(told(1.0), told(1300.0), fixed)[0].isl_tokens == pytest.approx(1300.0, abs=1.0)
