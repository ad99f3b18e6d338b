"""Chance in a number of requests: independent clients come in numbers that vary.

Their number in an interval is Poisson: with a mean of N its standard deviation is sqrt(N). A load that does
not change is to change no worker, so what lies within chance is no news; bursts are far beyond it.
"""

from __future__ import annotations

import math

RARE = 4.0
"""Standard deviations above its mean from which a number is no accident: that is exceeded by chance in
one interval of ten thousand, in three days of intervals of 30 s."""


def is_news(requests: float, expected: float) -> bool:
    """Tell whether that many requests are more than chance makes of the expected number."""
    return requests - expected > RARE * math.sqrt(expected)


def is_near(requests: float, mean: float) -> bool:
    """Tell whether a number is within a standard deviation of the mean, as two of three are by chance."""
    return (requests - mean) ** 2 <= mean
