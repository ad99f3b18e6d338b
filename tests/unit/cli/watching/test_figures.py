"""Rates and times of the last minute."""

from __future__ import annotations

import pytest

from dynaplan.cli.watching.figures import WINDOW_S, LoadWindow, percentile_ms

BOUNDS = ("0.1", "0.2", "+Inf")


def counts(
    requests: float, buckets: tuple[float, float, float], tokens: float = 0.0
) -> dict[tuple[str, str], float]:
    name = "time_to_first_token_seconds"
    own = {(f"{name}_bucket", bound): count for bound, count in zip(BOUNDS, buckets, strict=True)}
    own |= {(f"{name}_count", ""): buckets[-1], (f"{name}_sum", ""): 0.1 * buckets[-1]}
    itl = {("inter_token_latency_seconds_count", ""): tokens, ("inter_token_latency_seconds_sum", ""): 0.0}
    return {("requests", ""): requests, **own, **itl}


def test_two_readings_give_rates_means_and_percentiles() -> None:
    window = LoadWindow()
    window.add(0.0, counts(100, (50, 50, 50), 1000))
    assert window.figures() is None
    window.add(10.0, counts(150, (60, 100, 100), 1950))
    figures = window.figures()
    assert figures
    assert (figures.window_s, figures.requests_per_s, figures.tokens_per_s) == (10.0, 5.0, 100.0)
    assert figures.ttft_mean_ms == pytest.approx(100.0)
    # 10 of 50 lie below 100 ms and 40 evenly up to 200 ms: 47.5 of them are below 193.75 ms.
    assert figures.ttft_percentile_ms == pytest.approx(193.75)
    assert (figures.itl_mean_ms, figures.itl_percentile_ms) == (0.0, None)


def test_an_idle_minute_has_no_times() -> None:
    window = LoadWindow()
    for at_s in (0.0, 5.0):
        window.add(at_s, counts(7, (7, 7, 7)))
    figures = window.figures()
    assert figures
    assert (figures.requests_per_s, figures.ttft_mean_ms, figures.ttft_percentile_ms) == (0.0, None, None)


def test_only_the_last_minute_counts() -> None:
    window = LoadWindow()
    for second in range(0, 130, 5):
        window.add(float(second), counts(0 if second < 60 else 600, (0, 0, 0)))
    figures = window.figures()
    assert figures
    assert (figures.window_s, figures.requests_per_s) == (WINDOW_S, 0.0)


def test_frontends_that_began_anew_begin_the_window() -> None:
    window = LoadWindow()
    window.add(0.0, counts(100, (100, 100, 100)))
    window.add(5.0, counts(3, (3, 3, 3)))
    assert window.figures() is None


def test_a_percentile_above_the_last_bound_is_that_bound() -> None:
    assert percentile_ms(counts(0, (0, 1, 10)), "time_to_first_token_seconds", 95) == 200.0
    finite = {key: value for key, value in counts(0, (1, 2, 2)).items() if key[1] != "+Inf"}
    assert percentile_ms(finite, "time_to_first_token_seconds", 100) == 200.0
