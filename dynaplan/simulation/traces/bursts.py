"""Made-up bursts, five families: the traffic of a box that a few people share. All are drawn from a seed.

| kind | arrivals |
|---|---|
| ``bursts`` | Poisson at a high rate and at a low one in turns; both last heavy-tailed times |
| ``levels`` | Poisson at one of several rates, which change at random after heavy-tailed times |
| ``batches`` | many requests within seconds, heavy-tailed in number: scripts and evaluations |
| ``sessions`` | of a few people: questions, time to think, and after a while of work a pause |
| ``crowds`` | a steady rate, and crowds that come at once and fade |

``bursts`` and ``levels`` are Markov-modulated Poisson processes but for their times, which no Markov chain
has. ``sessions`` is the sum of on-off sources with heavy tails, which is self-similar (Willinger, Taqqu,
Sherman and Wilson, "Self-similarity through high-variability", 1997). ``crowds`` is a Neyman-Scott process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from heapq import heappop, heappush
from itertools import count


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


Numbers = Mapping[str, float]
"""Parameters of a load by their names."""

Arrivals = Callable[[Numbers, Iterator[float]], Iterator[float]]
"""Yields times of arrival in seconds, ascending, below the duration, from parameters and draws."""

TAIL = {"tail": 1.5}
"""The shape of the heavy tails: all moments from ``tail`` on are infinite."""

MIN_RATE = 1e-3
"""The lowest rate of ``levels``, requests/s: their rates grow by factors."""


def _at_rates(
    given: Numbers, draws: Iterator[float], spans: Iterator[tuple[float, float]]
) -> Iterator[float]:
    """Yield Poisson arrivals at rates (requests/s) that hold for spans (s) one after the other."""
    begin_s = 0.0
    for rate, length_s in spans:
        end_s = min(begin_s + length_s, given["duration"])
        at_s = begin_s
        while rate > 0 and (at_s := at_s + exponential(draws, 1 / rate)) < end_s:
            yield at_s
        begin_s = end_s
        if begin_s >= given["duration"]:
            return


def _bursts(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    def spans() -> Iterator[tuple[float, float]]:
        while True:
            yield given["low"], pareto(draws, given["off"], given["tail"])
            yield given["high"], pareto(draws, given["on"], given["tail"])

    return _at_rates(given, draws, spans())


def _levels(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    others = max(1, round(given["levels"]) - 1)
    low = max(given["low"], MIN_RATE)
    ratio = (given["high"] / low) ** (1 / others)

    def spans() -> Iterator[tuple[float, float]]:
        level = 0
        while True:
            yield low * ratio**level, pareto(draws, given["stay"], given["tail"])
            level = (level + 1 + int(next(draws) * others)) % (others + 1)

    return _at_rates(given, draws, spans())


def _merge_clusters(given: Numbers, clusters: Iterator[tuple[float, Iterator[float]]]) -> Iterator[float]:
    """Yield the arrivals of all clusters in order.

    Each is (its begin, its ascending times), begins ascend.
    """
    coming: list[tuple[float, int, Iterator[float]]] = []
    numbers = count()
    begin_s, cluster = next(clusters)
    while True:
        while begin_s < given["duration"] and (not coming or begin_s <= coming[0][0]):
            heappush(coming, (next(cluster, math.inf), next(numbers), cluster))
            begin_s, cluster = next(clusters, (math.inf, cluster))
        if not coming or coming[0][0] >= given["duration"]:
            return
        at_s, number, own = heappop(coming)
        yield at_s
        if (following_s := next(own, math.inf)) < given["duration"]:
            heappush(coming, (following_s, number, own))


def _batches(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    def clusters() -> Iterator[tuple[float, Iterator[float]]]:
        at_s = 0.0
        while True:
            at_s += exponential(draws, given["every"])
            size = max(1, round(pareto(draws, given["size"], given["tail"])))
            yield at_s, iter(sorted(at_s + given["within"] * next(draws) for _ in range(size)))

    return _merge_clusters(given, clusters())


def _crowds(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    def clusters() -> Iterator[tuple[float, Iterator[float]]]:
        yield 0.0, _at_rates(given, draws, iter([(given["low"], given["duration"])]))
        at_s = 0.0
        while True:
            at_s += exponential(draws, given["every"])
            size = max(1, round(given["fade"] * pareto(draws, given["high"], given["tail"])))
            yield at_s, iter(sorted(at_s + exponential(draws, given["fade"]) for _ in range(size)))

    return _merge_clusters(given, clusters())


def _sessions(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    def person() -> Iterator[float]:
        on, off, tail = given["on"], given["off"], given["tail"]
        is_on = next(draws) < on / (on + off)
        at_s = 0.0
        while True:
            end_s = at_s + (pareto(draws, on, tail) if is_on else pareto(draws, off, tail))
            while is_on and (at_s := at_s + exponential(draws, given["think"])) < end_s:
                yield at_s
            at_s, is_on = end_s, not is_on

    return _merge_clusters(given, iter([(0.0, person()) for _ in range(max(1, round(given["people"])))]))


BURSTS: Mapping[str, tuple[Numbers, Arrivals]] = {
    "bursts": ({"low": 0.2, "high": 20, "on": 60, "off": 120, **TAIL}, _bursts),
    "levels": ({"low": 1, "high": 30, "levels": 4, "stay": 60, **TAIL}, _levels),
    "batches": ({"every": 30, "size": 60, "within": 3, **TAIL}, _batches),
    "sessions": ({"people": 40, "think": 2, "on": 120, "off": 360, **TAIL}, _sessions),
    "crowds": ({"low": 3, "high": 20, "every": 200, "fade": 45, **TAIL}, _crowds),
}
"""The families with their parameters' defaults. ``low`` and ``high`` are requests/s (of a crowd: at its
begin, on average), ``on``, ``off``, ``stay``, ``think``, ``fade`` and ``within`` seconds, ``every`` the mean
seconds between batches or crowds, ``size`` the mean requests of a batch."""
