"""What holds for every forecast, whatever the history."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.settings.planner import PREDICTORS, ForecastSettings
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.planner.forecasting.forecaster import forecast
from dynaplan.planner.forecasting.series import join_warm_up
from dynaplan.planner.forecasting.traffic_history import interval_history

anything = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))
loads = st.one_of(st.none(), st.floats(0, 1e4), st.integers(0, 1000))
steps_ahead = st.integers(1, 12)
settings_of_all_kinds = st.builds(
    ForecastSettings,
    load_predictor=st.sampled_from(PREDICTORS),
    load_predictor_log1p=st.booleans(),
    kalman_q_level=st.floats(0, 100),
    kalman_q_trend=st.floats(0, 100),
    kalman_r=st.floats(1e-6, 1000),
    kalman_min_points=st.integers(1, 10),
)


@given(st.lists(anything, max_size=60), steps_ahead, settings_of_all_kinds)
def test_every_history_has_a_forecast_that_is_finite_and_not_negative(history, steps, settings):
    told = forecast(history, steps, settings)
    assert math.isfinite(told.value)
    assert told.value >= 0
    assert told.method in ("constant", "kalman")
    assert told.why


@given(st.lists(loads, max_size=60), steps_ahead, settings_of_all_kinds)
def test_the_same_history_has_the_same_forecast(history, steps, settings):
    assert forecast(history, steps, settings) == forecast(tuple(history), steps, settings)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=50), st.integers(1, 600))
def test_an_interval_history_has_every_request_but_those_of_the_unfinished_interval(gaps, interval_s):
    arrivals, at_s = [], 0.0
    for gap in gaps:
        at_s += gap
        arrivals.append(at_s)
    intervals = interval_history([TracedRequest(each, 10, 20) for each in arrivals], interval_s)
    end_s = len(intervals) * interval_s
    assert sum(each.requests for each in intervals) == sum(each < end_s for each in arrivals)
    assert end_s <= arrivals[-1] or len(intervals) == 1
    assert all((each.isl_tokens is None) == (each.requests == 0) for each in intervals)


@given(st.lists(loads, max_size=10), st.lists(loads, max_size=10))
def test_a_warm_up_is_kept_whole_and_live_values_count_from_the_first_traffic_on(warm_up, live):
    whole = join_warm_up(warm_up, live)
    assert whole[: len(warm_up)] == warm_up
    assert not warm_up or len(whole) == len(warm_up) or whole[len(warm_up)]
    assert warm_up or whole == live
