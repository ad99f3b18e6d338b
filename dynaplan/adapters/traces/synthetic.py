"""Made-up load, from a line of text like ``sinusoid:low=5,high=20,period=150,duration=600,isl=3000,osl=150``.

The arrivals of a rate that changes are found through its integral: in a cell of time, in which the rate is
taken as constant, as many requests arrive as the integral passes thresholds. Thresholds one apart make evenly
spaced arrivals, exponentially distributed ones a Poisson process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dynaplan.core.engine.draws import uniform_draws
from dynaplan.domain.errors import ConfigError, nearest
from dynaplan.domain.trace import TracedRequest

CELL_S = 0.1
Numbers = Mapping[str, float]

COMMON: Numbers = {"duration": 600, "isl": 3000, "osl": 150, "isl-cv": 0, "osl-cv": 0, "seed": 1}
"""What every kind takes: seconds, tokens, and the lengths' standard deviation over their mean."""


@dataclass(frozen=True)
class Kind:
    """One kind of load: its parameters with their defaults, and its rate, in requests/s, at a time."""

    defaults: Numbers
    rate: Callable[[float, Numbers], float]
    is_poisson: bool = True


def _sinusoid(at_s: float, of: Numbers) -> float:
    """From low up to high and back, once a period; begins at its lowest."""
    return of["low"] + (of["high"] - of["low"]) * (1 - math.cos(2 * math.pi * at_s / of["period"])) / 2


KINDS: Mapping[str, Kind] = {
    "constant": Kind({"rate": 10, "noise": 0.05, "every": 10}, lambda at_s, of: of["rate"], is_poisson=False),
    "poisson": Kind({"rate": 10}, lambda at_s, of: of["rate"]),
    "ramp": Kind(
        {"low": 5, "high": 20}, lambda at_s, of: of["low"] + (of["high"] - of["low"]) * at_s / of["duration"]
    ),
    "step": Kind(
        {"low": 5, "high": 20, "at": 300}, lambda at_s, of: of["low"] if at_s < of["at"] else of["high"]
    ),
    "sinusoid": Kind({"low": 5, "high": 20, "period": 150}, _sinusoid),
    "onoff": Kind(
        {"low": 0, "high": 20, "on": 60, "off": 60},
        lambda at_s, of: of["high"] if at_s % (of["on"] + of["off"]) < of["on"] else of["low"],
    ),
}
"""Rates in requests/s, times in s; ``noise`` is the standard deviation of the rate over the rate, drawn anew
``every`` so many seconds."""

LEAST = {"period": 0.1, "on": 0.1, "off": 0.1, "every": 0.1, "isl": 1, "osl": 1}


def is_synthetic(text: str) -> bool:
    """Whether the text names made-up load, and not a file."""
    return text.partition(":")[0] in KINDS


def synthetic(text: str) -> Iterator[TracedRequest]:
    """The requests of made-up load, the same for the same text. ConfigError at once for a wrong text.

    ``KIND`` or ``KIND:key=value,...``; what is not given has its default.
    """
    name, _, parameters = text.partition(":")
    if name not in KINDS:
        raise ConfigError(f"{text!r}: no load is called {name!r}", hint=nearest(name, KINDS))
    kind = KINDS[name]
    return _requests(kind, _numbers(text, parameters, {**COMMON, **kind.defaults}))


def _numbers(text: str, parameters: str, defaults: Numbers) -> Numbers:
    given = {}
    for each in filter(None, parameters.split(",")):
        key, _, value = (part.strip() for part in each.partition("="))
        if key not in defaults:
            raise ConfigError(f"{text!r} has no {key!r}", hint=nearest(key, defaults))
        given[key] = _number(text, key, value)
    return {**defaults, **given}


def _number(text: str, key: str, value: str) -> float:
    least = LEAST.get(key, 0)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ConfigError(f"{text!r}: {key} is {value!r}", hint=f"expected a number, {least:g} or more")
    return number


def _requests(kind: Kind, of: Numbers) -> Iterator[TracedRequest]:
    seed = int(of["seed"])
    isl = _lengths(of["isl"], of["isl-cv"], uniform_draws(seed + 1))
    osl = _lengths(of["osl"], of["osl-cv"], uniform_draws(seed + 2))
    for at_s in _arrivals(kind, of, uniform_draws(seed)):
        yield TracedRequest(at_s, next(isl), next(osl))


def _arrivals(kind: Kind, of: Numbers, draws: Iterator[float]) -> Iterator[float]:
    """Times in seconds, ascending, below the duration."""
    noise = _noise(of, uniform_draws(int(of["seed"]) + 3))
    # Evenly spaced arrivals begin half a space after the beginning.
    expected, threshold = 0.0, _exponential(draws) if kind.is_poisson else 0.5
    for cell in range(math.ceil(of["duration"] / CELL_S)):
        begin_s = cell * CELL_S
        length_s = min(CELL_S, of["duration"] - begin_s)
        rate = kind.rate(begin_s + length_s / 2, of) * next(noise)
        while rate > 0 and expected + rate * length_s > threshold:
            yield begin_s + (threshold - expected) / rate
            threshold += _exponential(draws) if kind.is_poisson else 1.0
        expected += rate * length_s


def _noise(of: Numbers, draws: Iterator[float]) -> Iterator[float]:
    """What the rate of each cell is multiplied with."""
    if not of.get("noise"):
        while True:
            yield 1.0
    cells = max(1, round(of["every"] / CELL_S))
    while True:
        factor = max(0.0, 1 + of["noise"] * _normal(draws))
        for _ in range(cells):
            yield factor


def _lengths(mean: float, variation: float, draws: Iterator[float]) -> Iterator[int]:
    """Lengths in tokens, at least 1: all the same, or lognormal with that mean and variation."""
    if not variation:
        while True:
            yield max(1, round(mean))
    sigma = math.sqrt(math.log1p(variation * variation))
    centre = math.log(mean) - sigma * sigma / 2
    while True:
        yield max(1, round(math.exp(centre + sigma * _normal(draws))))


def _exponential(draws: Iterator[float]) -> float:
    return -math.log1p(-next(draws))


def _normal(draws: Iterator[float]) -> float:
    """Box and Muller's."""
    radius = math.sqrt(2 * _exponential(draws))
    return radius * math.cos(2 * math.pi * next(draws))
