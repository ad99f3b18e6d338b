"""Curves of the load for tests, the same every time."""

from __future__ import annotations

import math
from collections.abc import Callable

from dynaplan.util.splitmix import UniformDraws


def curve(rate: Callable[[int], float], intervals: int, noise: float = 0.0, seed: int = 1) -> list[float]:
    """The rate at each interval, with noise of that standard deviation over the rate."""
    draws = UniformDraws(seed)
    # Twelve draws from 0 to 1 add up to a bell of variance 1.
    return [
        max(0.0, rate(index) * (1 + noise * (sum(next(draws) for _ in range(12)) - 6)))
        for index in range(intervals)
    ]


def wave(index: int, period: float = 15.0) -> float:
    """From 50 to 200 and back, like the sinusoid of 5 to 20 requests/s seen every 10 s."""
    return 125 - 75 * math.cos(2 * math.pi * index / period)
