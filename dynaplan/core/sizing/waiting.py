"""Queues in closed form."""

from __future__ import annotations

import math

SQRT_2 = math.sqrt(2.0)


def probability_of_waiting(servers: int, load: float) -> float:
    """Erlang's C: the part of Poisson arrivals that find all servers busy, ``load`` of them on average."""
    if load <= 0:
        return 0.0
    if load >= servers:
        return 1.0
    blocked = 1.0
    for each in range(1, servers + 1):
        blocked = load * blocked / (each + load * blocked)
    return blocked / (1 - load / servers * (1 - blocked))


def normal_tail(distance: float) -> float:
    """How likely a normal variable lies so many standard deviations or more above its mean."""
    return 0.5 * math.erfc(distance / SQRT_2)


def gamma_tail(value: float, mean: float, variance: float) -> float:
    """How likely a gamma variable of that mean and variance exceeds the value.

    By Wilson and Hilferty: the cube root of a gamma variable is nearly normal.
    """
    if value <= 0:
        return 1.0
    if mean <= 0:
        return 0.0
    if variance <= 1e-9 * mean * mean:
        return 1.0 if value < mean else 0.0
    ninth = variance / (9 * mean * mean)
    return normal_tail(((value / mean) ** (1 / 3) - (1 - ninth)) / math.sqrt(ninth))
