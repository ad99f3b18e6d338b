"""What each method is good for: the reason why it is there."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from dynaplan.config.settings.planner import ForecastSettings, PlannerSettings
from dynaplan.planner.forecasting.forecaster import METHODS, choose_method, forecast, run_method
from dynaplan.planner.forecasting.selection import MIN_COMPARED, choose, loss, score
from dynaplan.planner.forecasting.smoothing import trend
from dynaplan.util.errors import ConfigError
from tests.unit.planner.forecasting.curves import curve, wave

AUTO = ForecastSettings()


def mean_error(name: str, series: list[float], steps: int) -> float:
    told = run_method(name, [*series], steps, AUTO)
    return score(told[len(told) // 2 :], [*series][len(told) // 2 :], steps).mean_error


def test_a_level_is_best_followed_by_smoothing() -> None:
    series = curve(lambda index: 100.0, 200, noise=0.05)
    assert mean_error("level", series, 1) < 0.85 * mean_error("constant", series, 1)
    assert mean_error("level", series, 6) < 0.85 * mean_error("kalman", series, 6)


def test_a_ramp_is_best_followed_by_its_trend() -> None:
    series = curve(lambda index: 100.0 + 10 * index, 100, noise=0.01)
    assert mean_error("kalman", series, 6) < 0.3 * mean_error("constant", series, 6)


def test_a_wave_is_foretold_without_being_told_its_period() -> None:
    series = curve(wave, 100, noise=0.05)
    for steps in (1, 3, 6):
        assert mean_error("autoregression", series, steps) < 0.4 * mean_error("constant", series, steps)
        assert mean_error("seasonal", series, steps) < 0.4 * mean_error("constant", series, steps)


def test_a_wave_is_foretold_before_its_second_period_ends() -> None:
    series = curve(wave, 26)
    told = run_method("autoregression", [*series], 3, AUTO)
    assert abs(told[-1] - wave(28)) < 0.3 * abs(wave(25) - wave(28))


def test_what_was_learnt_never_foretells_far_more_or_far_less_than_there_was_of_late() -> None:
    for series in (curve(wave, 40), curve(lambda index: 200.0 if index % 10 < 5 else 20.0, 60)):
        for now, told in enumerate(run_method("autoregression", [*series], 3, AUTO)):
            recent = series[max(0, now - 29) : now + 1]
            assert min(recent) / 1.5 <= told <= 1.5 * max(recent)


def test_on_and_off_is_foretold_by_its_period() -> None:
    series = curve(lambda index: 200.0 if index % 30 < 15 else 10.0, 150, noise=0.05)
    assert mean_error("seasonal", series, 6) < 0.25 * mean_error("constant", series, 6)


def test_no_period_is_seen_in_noise() -> None:
    series = curve(lambda index: 100.0, 200, noise=0.2)
    assert run_method("seasonal", [*series], 3, AUTO) == run_method("level", [*series], 3, AUTO)


def test_a_forecast_that_is_too_low_costs_three_times_as_much_as_one_that_is_too_high() -> None:
    assert loss(forecast=8.0, actual=10.0) == 3 * loss(forecast=12.0, actual=10.0) == 6.0


def test_a_score_holds_each_forecast_against_the_interval_it_was_for() -> None:
    result = score([5.0, 5.0, 5.0, 9.0], [5.0, 5.0, 7.0, None], 2)
    assert (result.count, result.mean_error, result.mean_loss, result.mean_actual) == (1, 2.0, 6.0, 7.0)
    assert score([1.0], [1.0], 1).count == 0


# -- auto ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("series", "steps", "method"),
    [
        (curve(lambda index: 100.0, 120, noise=0.05), 3, "level"),
        (curve(lambda index: 100.0 + 10 * index, 100, noise=0.01), 3, "kalman"),
        (curve(lambda index: wave(index, period=60), 100, noise=0.02), 3, "autoregression"),
        (curve(lambda index: 200.0 if index % 30 < 15 else 10.0, 200, noise=0.02), 4, "seasonal"),
    ],
)
def test_auto_takes_the_method_that_fits(series: list[float], steps: int, method: str) -> None:
    told = forecast(series, steps, AUTO)
    assert told.method == method
    assert told.why.startswith(f"auto: {method}, weighted error ")
    assert all(re.search(rf"\b{other} \d\.\d\d\d", told.why) for other in METHODS if other != method)


def test_auto_is_the_last_value_until_there_is_something_to_compare() -> None:
    told = forecast([10.0, 20.0, 30.0], 1, AUTO)
    assert (told.value, told.method) == (30.0, "constant")
    assert told.why == "auto: constant, because only 2 forecasts can be compared yet"


def test_auto_begins_with_a_trend_where_the_values_are_numbers_of_requests() -> None:
    rising = [100.0, 150.0, 200.0, 250.0]
    told = forecast(rising, 1, AUTO, is_count=True)
    assert told.method == "trend"
    assert told.value == trend(rising, 1)[-1] > 250.0
    assert told.why == "auto: trend, because only 3 forecasts can be compared yet"
    assert forecast(rising, 1, AUTO).value == 250.0


@pytest.mark.parametrize("steps", [1, 3])
def test_auto_leaves_the_trend_as_soon_as_it_can_compare(steps: int) -> None:
    methods = choose_method([100.0 + 50 * index for index in range(20)], steps, AUTO, is_count=True).methods
    comparable = MIN_COMPARED - 1 + steps
    assert set(methods[:comparable]) == {"trend"}
    assert set(methods[comparable:]) <= set(METHODS)


def test_what_auto_began_with_changes_nothing_of_what_it_chooses_later() -> None:
    series = curve(wave, 60, noise=0.05)
    with_trend = choose_method([*series], 3, AUTO, is_count=True)
    without = choose_method([*series], 3, AUTO)
    assert with_trend.losses == without.losses
    assert with_trend.methods[-30:] == without.methods[-30:]
    assert with_trend.forecasts[-30:] == without.forecasts[-30:]


def test_trend_is_nothing_to_choose() -> None:
    assert "trend" not in METHODS
    with pytest.raises(ConfigError, match="load-predictor is 'trend'"):
        PlannerSettings.from_options({"load-predictor": "trend"})


def test_a_predictor_that_was_chosen_does_not_begin_with_a_trend() -> None:
    constant = ForecastSettings(load_predictor="constant")
    assert forecast([100.0, 150.0, 200.0], 1, constant, is_count=True).value == 200.0


def test_what_is_begun_with_is_used_until_outcomes_can_be_compared() -> None:
    told, beginning = {"one": [10.0] * 20, "other": [9.0] * 20}, ("early", [7.0] * 20)
    choice = choose(told, [10.0] * 20, 2, beginning)
    known = MIN_COMPARED - 1 + 2
    assert choice.methods == ("early",) * known + ("one",) * (20 - known)
    assert choice.forecasts == (7.0,) * known + (10.0,) * (20 - known)


def test_auto_is_never_much_worse_than_the_best_single_method_and_better_than_the_last_value() -> None:
    shapes = {
        "level": curve(lambda index: 100.0, 200, noise=0.1),
        "wave": curve(wave, 200, noise=0.05),
        "ramp": curve(lambda index: 50.0 + 4 * index, 200, noise=0.05),
        "on and off": curve(lambda index: 200.0 if index % 40 < 20 else 10.0, 200, noise=0.05),
    }
    for name, series in shapes.items():
        chosen = choose_method([*series], 3, AUTO).forecasts
        losses = {
            method: score(run_method(method, [*series], 3, AUTO)[50:], [*series][50:], 3).mean_loss
            for method in METHODS
        }
        own = score(chosen[50:], [*series][50:], 3).mean_loss
        assert own < 1.25 * min(losses.values()), name
        assert own < losses["constant"], name


def test_auto_does_not_flap_between_methods_on_a_steady_load() -> None:
    for seed in range(5):
        series = curve(lambda index: 100.0, 240, noise=0.1, seed=seed)
        methods = choose_method([*series], 3, AUTO).methods
        assert sum(one != other for one, other in pairwise(methods)) <= 3


def test_a_challenger_must_be_clearly_better() -> None:
    series = [100.0] * 30
    told = {"first": [110.0] * 30, "slightly better": [109.5] * 30}
    assert set(choose(told, [*series], 1).methods) == {"first"}
    told["clearly better"] = [105.0] * 30
    assert choose(told, [*series], 1).methods[-1] == "clearly better"


def test_of_equals_the_first_one_is_chosen() -> None:
    told = {"bad": [0.0] * 20, "one": [10.0] * 20, "other": [10.0] * 20}
    assert choose(told, [10.0] * 20, 1).methods[-1] == "one"


@pytest.mark.parametrize(("came", "is_news"), [(71.0, False), (73.0, True)])
def test_a_number_of_requests_that_chance_may_make_is_no_news(came: float, is_news: bool) -> None:
    """Of a mean of 45 independent requests 72 are four standard deviations more."""
    series = [*[45.0] * 20, came]
    told = {"mean": [45.0] * 21}
    assert (choose(told, series, 1, is_count=True).forecasts[-1] == came) is is_news
    assert choose(told, series, 1).forecasts[-1] == came
