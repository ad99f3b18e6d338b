"""Limits by the sliding minute: how long one has to wait, and what the headers say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.gateway.keys.limits import MinuteUsage, Used, rate_headers


@pytest.mark.parametrize(
    ("window", "wait_s"),
    [
        (MinuteUsage(10, 0, 0, 30.0), 0.0),
        (MinuteUsage(10, 9, 0, 30.0), 0.0),
        (MinuteUsage(10, 10, 0, 30.0), 30.0 + 6.0),  # a tenth of them has left 6 s into the next minute
        (MinuteUsage(10, 0, 20, 0.0), 33.0),  # 20 * (1 - 33 / 60) = 9
        (MinuteUsage(1, 1, 0, 0.0), 120.0),
        (MinuteUsage(10, 0, 20, 40.0), 0.0),
    ],
)
def test_one_waits_until_there_is_room(window: MinuteUsage, wait_s: float) -> None:
    assert window.wait_s(1) == pytest.approx(wait_s)


def test_what_is_larger_than_the_limit_never_passes() -> None:
    assert MinuteUsage(100, 0, 0, 0.0).wait_s(101) == math.inf
    assert MinuteUsage(100, -50, 0, 0.0).wait_s(101) == math.inf


@given(
    st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 1000), st.floats(0, 59.9), st.integers(1, 9)
)
def test_after_the_wait_the_amount_is_within_the_limit(
    limit: int, now: int, before: int, elapsed_s: float, amount: int
) -> None:
    window = MinuteUsage(limit, now, before, elapsed_s)
    if (wait_s := window.wait_s(amount)) == math.inf:
        assert amount > limit
        return
    at_s = elapsed_s + wait_s
    then = MinuteUsage(limit, now, before, at_s) if at_s < 60 else MinuteUsage(limit, 0, now, at_s - 60)
    assert then.used + amount <= limit + 1e-6
    if wait_s > 0.001:
        assert window.used + amount > limit - 1e-6


def test_the_headers_are_openais() -> None:
    used = Used(requests_now=11, requests_before=20)
    assert rate_headers({"requests": 60, "tokens": 99}, used, 30.0, requests=1) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "38",
        "x-ratelimit-reset-requests": "1m30s",
        "x-ratelimit-limit-tokens": "99",
        "x-ratelimit-remaining-tokens": "99",
        "x-ratelimit-reset-tokens": "0s",
    }
