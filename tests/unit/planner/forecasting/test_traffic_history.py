"""What is kept of the traffic of past intervals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import HISTORY_INTERVALS
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.forecasting.traffic_history import (
    HALF_LIFE_S,
    MIN_REQUESTS_FOR_HITS,
    IntervalLoad,
    TrafficHistory,
)

INTERVAL_S = 30.0
BOUNDS = (0.0, 100.0, 200.0)
SHORT = Lengths(BOUNDS, (0.0, 10.0, 0.0, 0.0), 80.0)
LONG = Lengths(BOUNDS, (0.0, 0.0, 10.0, 0.0), 180.0)


def traffic(
    requests: float | None = 60.0,
    interval_s: float = INTERVAL_S,
    isl: Lengths | None = None,
    dispersion: float | None = None,
) -> Traffic:
    return Traffic(interval_s, requests, 1000.0, 100.0, isl=isl, dispersion=dispersion)


def after(*intervals: Traffic, before: list[IntervalLoad] | None = None) -> TrafficHistory:
    history = TrafficHistory(INTERVAL_S, before or [])
    for each in intervals:
        history.add(each)
    return history


def test_each_curve_has_a_value_per_interval_the_newest_last_and_none_where_there_was_no_data() -> None:
    history = after(traffic(1.0), traffic(None), traffic(0.0))
    assert history.curve("requests") == [1.0, None, 0.0]
    assert history.curve("isl_tokens") == [1000.0] * 3
    assert history.curve("osl_tokens") == [100.0] * 3
    assert history.interval_s == INTERVAL_S


def test_an_interval_that_lasted_longer_counts_as_if_it_had_not() -> None:
    assert after(traffic(90.0, 45.0), traffic(30.0, 15.0)).curve("requests") == [60.0, 60.0]


def test_the_history_does_not_grow_beyond_what_forecasts_look_back_on() -> None:
    history = after(*(traffic(float(each)) for each in range(HISTORY_INTERVALS + 50)))
    requests = history.curve("requests")
    assert len(requests) == HISTORY_INTERVALS
    assert requests[-1] == HISTORY_INTERVALS + 49


def test_a_warm_up_comes_first_and_today_counts_from_its_first_traffic_on() -> None:
    warm = [IntervalLoad(5, 900.0, 90.0), IntervalLoad(0, None, None)]
    history = after(traffic(None), traffic(0.0), traffic(7.0), traffic(0.0), before=warm)
    assert history.curve("requests") == [5.0, 0.0, 7.0, 0.0]
    assert after(before=warm).curve("isl_tokens") == [900.0, None]


def test_lengths_that_are_a_half_life_old_weigh_half() -> None:
    intervals = round(HALF_LIFE_S / INTERVAL_S)
    history = after(traffic(isl=SHORT), *([traffic(isl=LONG)] * intervals))
    assert history.isl
    assert history.isl.counts[1] == pytest.approx(5.0)
    assert history.isl.mean_tokens
    assert 80.0 < history.isl.mean_tokens < 180.0


def test_an_interval_without_requests_forgets_no_lengths() -> None:
    history = after(traffic(isl=SHORT), traffic(isl=None), traffic(isl=Lengths(BOUNDS, (0.0,) * 4)))
    assert history.isl == SHORT


def test_lengths_in_other_buckets_take_the_place_of_those_before() -> None:
    other = Lengths.of([5.0, 7.0])
    assert after(traffic(isl=SHORT), traffic(isl=other)).isl == other


def test_dispersion_is_the_mean_at_first_and_fades_later() -> None:
    assert after(traffic()).dispersion is None
    assert after(traffic(dispersion=1.0), traffic(dispersion=3.0)).dispersion == pytest.approx(2.0)
    many = after(*([traffic(dispersion=1.0)] * 200), *([traffic(dispersion=3.0)] * 10))
    assert many.dispersion == pytest.approx(2.0)
    assert after(traffic(dispersion=4.0), traffic(dispersion=None)).dispersion == 4.0


def test_the_hit_rate_is_over_the_tokens_of_recent_prompts_and_fades() -> None:
    cached = replace(traffic(60.0), prefix_hit_rate=0.8)
    assert after(traffic(60.0)).prefix_hit_rate is None
    assert after(cached).prefix_hit_rate == pytest.approx(0.8)
    few = replace(traffic(6.0), prefix_hit_rate=0.0)
    assert after(cached, few).prefix_hit_rate == pytest.approx(0.8, abs=0.09)
    cold, half = replace(traffic(60.0), prefix_hit_rate=0.0), round(HALF_LIFE_S / INTERVAL_S)
    assert after(*[cold] * 100, *[cached] * half).prefix_hit_rate == pytest.approx(0.4, abs=0.01)
    assert after(cached, replace(traffic(None), prefix_hit_rate=None)).prefix_hit_rate == pytest.approx(0.8)


def test_lost_hits_count_at_once_unless_few_requests_say_so() -> None:
    cached = [replace(traffic(60.0), prefix_hit_rate=0.8)] * 100
    assert after(*cached, replace(traffic(60.0), prefix_hit_rate=0.3)).prefix_hit_rate == 0.3
    few = replace(traffic(MIN_REQUESTS_FOR_HITS - 1.0), prefix_hit_rate=0.3)
    assert after(*cached, few).prefix_hit_rate == pytest.approx(0.8, abs=0.05)
