"""What ``auto`` begins with on numbers of requests: a line as far as one goes through, or the last value."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import mean

import pytest

from dynaplan.config.settings.planner import ForecastSettings
from dynaplan.planner.forecasting.forecaster import forecast
from dynaplan.planner.forecasting.smoothing import TREND_DAMPING, trend
from tests.unit.planner.forecasting.curves import curve


def independent(rate: float) -> list[list[float]]:
    """Counts about a constant rate, spread as those of independent clients."""
    return [curve(lambda _: rate, 12, noise=rate**-0.5, seed=seed) for seed in range(20)]


def test_the_last_value_is_the_forecast_of_fewer_than_three_intervals() -> None:
    assert trend([], 3) == []
    assert trend([5.0], 3) == [5.0]
    assert trend([5.0, 500.0], 3) == [5.0, 500.0]


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_a_constant_load_is_forecast_exactly(steps: int) -> None:
    assert trend([70.0] * 8, steps) == pytest.approx([70.0] * 8)


@pytest.mark.parametrize("slope", [50.0, -50.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_line_is_carried_on_and_no_further_than_it_would_go(slope: float, steps: int) -> None:
    series = [1000.0 + slope * index for index in range(12)]
    went = (trend([*series], steps)[-1] - series[-1]) / slope
    would_go = sum(TREND_DAMPING**each for each in range(1, steps + 1))
    assert 0.85 * would_go < went <= would_go < steps


def test_a_slope_fades_the_further_ahead_one_looks() -> None:
    series = [100.0 + 10 * index for index in range(12)]
    told = [trend([*series], steps)[-1] for steps in range(1, 30)]
    steps = [after - before for before, after in pairwise(told)]
    assert all(0 < after < before for before, after in pairwise(steps))


def test_nothing_is_foretold_beyond_half_as_much_again_as_there_ever_was() -> None:
    assert trend([100.0, 400.0, 1000.0], 6)[-1] == 1500.0
    assert trend([1000.0, 500.0, 100.0], 6)[-1] == pytest.approx(100.0 / 1.5)


def test_a_slope_counts_from_the_third_interval_on() -> None:
    assert trend([100.0, 150.0, 200.0], 1)[-1] > 220.0


def test_the_slower_the_rise_the_longer_it_must_last_before_it_is_no_chance() -> None:
    series = [100.0 + 5 * index for index in range(12)]
    told = trend([*series], 3)
    assert told[4] <= series[4]
    assert told[-1] > series[-1] + 5.0


@pytest.mark.parametrize("rate", [25.0, 400.0])
@pytest.mark.parametrize("steps", [1, 3])
def test_the_noise_of_independent_clients_is_taken_for_no_slope(rate: float, steps: int) -> None:
    counted = independent(rate)
    forecasts = [each for series in counted for each in trend([*series], steps)[2:]]
    last_values = [each for series in counted for each in series[2:]]
    assert max(abs(each - rate) for each in forecasts) < 3 * rate**0.5
    assert mean(abs(each - rate) for each in forecasts) < 0.6 * mean(abs(each - rate) for each in last_values)


@pytest.mark.parametrize(("low", "high"), [(100.0, 400.0), (400.0, 100.0)])
def test_a_jump_is_carried_on_for_one_interval_and_is_the_level_after_the_next(
    low: float, high: float
) -> None:
    """Of the interval after a jump nobody can tell whether it is one, or the beginning of a rise."""
    told = trend([*[low] * 8, *[high] * 6], 3)
    assert told[:8] == pytest.approx([low] * 8)
    assert (told[8] - high) * (high - low) > 0
    assert told[9:] == pytest.approx([high] * 5)


def test_one_interval_out_of_line_is_forgotten_after_two_more() -> None:
    told = trend([*[100.0] * 8, 400.0, *[100.0] * 5], 3)
    assert told[10:] == pytest.approx([100.0] * 4)


@pytest.mark.parametrize("quiet", [2, 3])
def test_a_jump_in_the_first_intervals_is_no_noise_either(quiet: int) -> None:
    told = trend([*[50.0] * quiet, *[400.0] * 3], 3)
    assert min(told[quiet:]) > 350.0


def test_an_interval_without_data_is_as_the_one_before() -> None:
    assert trend([100.0, 150.0, None, 200.0, None], 2) == trend([100.0, 150.0, 150.0, 200.0, 200.0], 2)


def test_no_traffic_is_forecast_to_stay_none() -> None:
    assert trend([0.0] * 12, 6) == [0.0] * 12


@pytest.mark.parametrize("series", [[1e-292, 0.0, 0.0], [1e170, 0.0, 0.0], [1e308] * 4], ids=str)
def test_numbers_that_are_no_numbers_of_requests_break_nothing(series: list[float]) -> None:
    """A square of theirs is 0, or infinite. What is not finite ``forecast`` makes the last value."""
    assert len(trend([*series], 3)) == len(series)
    assert math.isfinite(forecast(series, 3, ForecastSettings(), is_count=True).value)


def test_what_is_older_than_the_longest_line_does_not_count() -> None:
    newest = [100.0 + 9 * (index % 4) for index in range(12)]
    assert (
        trend([*([1e6] * 5), *newest], 3)[-1]
        == trend([*([0.0] * 5), *newest], 3)[-1]
        == trend([*newest], 3)[-1]
    )
