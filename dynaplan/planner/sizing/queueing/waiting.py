"""Textbook queueing formulas: the chance to wait, and tails of the normal and the gamma distribution.

``probability_of_waiting`` is Erlang's C formula (1917) for Poisson arrivals, exponential service and c
servers, by the recursion of Erlang's B formula (Kleinrock, Queueing Systems I, 1975, section 3.5):

    B(0) = 1,  B(k) = a B(k-1) / (k + a B(k-1)),  C = B(c) / (1 - a/c (1 - B(c)))

with the offered load a in servers. It is exact for exponential service and close for others.

``gamma_tail`` stands for waiting times: they are positive, skewed, and known by mean and variance only. It
uses Wilson and Hilferty's approximation (1931): the cube root of a gamma variable is nearly normal. The
tail is off by at most 0.003 at a coefficient of variation of 0.7, and 0.012 at 1.
"""

from __future__ import annotations

import math

SQRT_2 = math.sqrt(2.0)
"""Square root of 2, computed once: the error function counts in it."""


def probability_of_waiting(servers: int, load: float) -> float:
    """Return the part of the arrivals that find all servers busy (Erlang C); 1 when overloaded.

    ``load`` is the mean number of busy servers: arrivals per ms times ms of service.
    """
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = load * blocked / (count + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def normal_tail(distance: float) -> float:
    """Return the chance that a normal variable is at least ``distance`` deviations above its mean."""
    return 0.5 * math.erfc(distance / SQRT_2)


def gamma_tail(value: float, mean: float, variance: float) -> float:
    """Return the chance of a gamma variable of that mean and variance to exceed ``value``."""
    if value <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    if variance <= 1e-9 * mean * mean:
        return 1.0 if value < mean else 0.0
    ninth = variance / (9 * mean * mean)
    return normal_tail(((value / mean) ** (1 / 3) - (1 - ninth)) / math.sqrt(ninth))
