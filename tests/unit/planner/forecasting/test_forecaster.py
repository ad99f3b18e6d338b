"""What a forecast says of a history, whatever the method."""

from __future__ import annotations

import math

import pytest

from dynaplan.config.settings.planner import PREDICTORS, Forecast, ForecastSettings
from dynaplan.planner.forecasting.forecaster import forecast

KALMAN = ForecastSettings(load_predictor="kalman")
CONSTANT = ForecastSettings(load_predictor="constant")

FILTERPY = [
    10.0,
    12.984584784,
    10.143518488,
    15.678581219,
    21.543355775,
    28.0311215,
    28.857652476,
    32.676914383,
]
"""One step ahead after each of MEASURED, by filterpy 2.0 with the original planner's matrices."""
FILTERPY_OTHER = [
    10.0,
    12.995258298,
    10.04596958,
    15.707685529,
    21.600450716,
    28.107741326,
    28.808252039,
    32.66729785,
]
"""The same with q-level 0.5, q-trend 0.02 and r 3."""
MEASURED = [10.0, 12.0, 11.0, 15.0, 20.0, 26.0, 24.0, 30.0]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_no_data_is_a_forecast_that_knows_nothing(predictor: str) -> None:
    settings = ForecastSettings(load_predictor=predictor)
    nothing = Forecast(0.0, "constant", "no data so far", is_known=False)
    assert forecast([], 1, settings) == nothing
    assert forecast([None, math.nan, -1.0, math.inf], 3, settings) == nothing


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_no_traffic_is_known_to_be_no_traffic(predictor: str) -> None:
    assert forecast([None, 0.0, 0.0], 1, ForecastSettings(load_predictor=predictor)) == Forecast(
        0.0, "constant", "no traffic so far"
    )


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_traffic_that_has_stopped_is_forecast_to_have_stopped(predictor: str) -> None:
    settings = ForecastSettings(load_predictor=predictor)
    assert forecast([10.0] * 10 + [0.0] * 60, 1, settings).value == pytest.approx(0.0, abs=0.2)


def test_constant_is_the_last_measurement_however_long_ago_it_was() -> None:
    assert forecast([3.0, 8.0, None, math.nan], 5, CONSTANT).value == 8.0


def test_kalman_gives_the_originals_numbers() -> None:
    settings = ForecastSettings(load_predictor="kalman", kalman_min_points=1)
    told = [forecast(MEASURED[: end + 1], 1, settings).value for end in range(len(MEASURED))]
    assert told == pytest.approx(FILTERPY)
    other = ForecastSettings(
        load_predictor="kalman", kalman_min_points=1, kalman_q_level=0.5, kalman_q_trend=0.02, kalman_r=3.0
    )
    told = [forecast(MEASURED[: end + 1], 1, other).value for end in range(len(MEASURED))]
    assert told == pytest.approx(FILTERPY_OTHER)


def test_kalman_by_hand() -> None:
    # P = 1000 I; predicted: [[2001, 1000], [1000, 1000.1]]; gains 2001/2011 and 1000/2011 of a surprise of 2.
    settings = ForecastSettings(load_predictor="kalman", kalman_min_points=1)
    assert forecast([10.0, 12.0], 1, settings).value == pytest.approx(10 + 2 * 2001 / 2011 + 2 * 1000 / 2011)


def test_kalman_says_the_last_value_while_it_warms_up() -> None:
    told = forecast(MEASURED[:4], 1, KALMAN)
    assert (told.value, told.why) == (15.0, "the last value: kalman is warming up, 4 of 5 measurements")
    assert forecast(MEASURED[:5], 1, KALMAN).value != 20.0


def test_what_came_before_the_first_traffic_does_not_count() -> None:
    assert forecast([0.0, None, 0.0, *MEASURED], 2, KALMAN) == forecast(MEASURED, 2, KALMAN)


def test_each_step_ahead_goes_on_along_the_trend() -> None:
    ramp = [float(index) for index in range(1, 40)]
    assert [forecast(ramp, steps, KALMAN).value for steps in (1, 2, 6)] == pytest.approx(
        [40, 41, 45], abs=0.1
    )


def test_an_interval_without_data_is_bridged_along_the_trend_and_is_not_no_traffic() -> None:
    ramp: list[float | None] = [float(index) for index in range(1, 40)]
    assert forecast([*ramp, None, None], 1, KALMAN).value == pytest.approx(42, abs=0.1)
    assert forecast([*ramp, 0.0, 0.0], 1, KALMAN).value < 30


def test_a_falling_trend_ends_at_nothing() -> None:
    falling = [float(100 - 5 * index) for index in range(20)]
    assert forecast(falling, 10, KALMAN).value == 0.0


def test_log1p_follows_growth_by_a_factor() -> None:
    doubling = [2.0**index for index in range(16)]
    logarithmic = ForecastSettings(
        load_predictor="kalman",
        load_predictor_log1p=True,
        kalman_q_level=1e-4,
        kalman_q_trend=1e-2,
        kalman_r=1e-4,
    )
    assert forecast(doubling, 1, logarithmic).value == pytest.approx(2.0**16, rel=0.02)
    assert forecast(doubling, 1, KALMAN).value < 0.9 * 2.0**16


def test_log1p_of_a_runaway_trend_stays_finite() -> None:
    steep = [10.0**index for index in range(0, 300, 20)]
    told = forecast(steep, 500, ForecastSettings(load_predictor="kalman", load_predictor_log1p=True))
    assert math.isfinite(told.value)


def test_what_is_computed_outside_is_the_last_value_here_and_says_so() -> None:
    told = forecast(MEASURED, 1, ForecastSettings(load_predictor="arima"))
    assert (told.value, told.method, told.why) == (
        30.0,
        "constant",
        "the last value: arima is not computed here",
    )


@pytest.mark.parametrize("predictor", ["constant", "kalman"])
@pytest.mark.parametrize("load", [7.0, 7])
def test_a_load_that_stays_is_forecast_to_stay(predictor: str, load: float) -> None:
    told = forecast([load] * 40, 4, ForecastSettings(load_predictor=predictor))
    assert (told.value, told.method) == (pytest.approx(7.0), predictor)
