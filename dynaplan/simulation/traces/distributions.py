"""Draws of the distributions that made-up load needs, each out of numbers evenly drawn from [0, 1)."""

from __future__ import annotations

import math
from collections.abc import Iterator


def exponential(draws: Iterator[float], mean: float = 1.0) -> float:
    """Return an exponentially distributed draw: the time to the next arrival of a Poisson process."""
    return -mean * math.log1p(-next(draws))


def normal(draws: Iterator[float]) -> float:
    """Return a draw of the standard normal distribution, by Box and Muller (1958)."""
    radius = math.sqrt(2 * exponential(draws))
    return radius * math.cos(2 * math.pi * next(draws))


def pareto(draws: Iterator[float], mean: float, tail: float) -> float:
    """Return a heavy-tailed draw, Pareto's of that mean: P(X > x) falls as x to the power of ``-tail``.

    ``tail`` is above 1; up to 2 the variance is infinite, as has been measured for the times that people work
    and pause (Crovella and Bestavros, "Self-Similarity in World Wide Web Traffic", 1997: 1.0 to 1.5).
    """
    return mean * (tail - 1) / tail * math.pow(1 - next(draws), -1 / tail)


def lengths(mean: float, variation: float, draws: Iterator[float]) -> Iterator[int]:
    """Yield lengths in tokens, at least 1: all the same, or lognormal with that mean and variation."""
    if not variation:
        while True:
            yield max(1, round(mean))
    sigma = math.sqrt(math.log1p(variation * variation))
    centre = math.log(mean) - sigma * sigma / 2
    while True:
        yield max(1, round(math.exp(centre + sigma * normal(draws))))
