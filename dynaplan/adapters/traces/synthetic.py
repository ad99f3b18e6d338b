"""Made-up load, from a line of text like ``sinusoid:low=5,high=20,period=150,duration=600,isl=3000,osl=150``.

The arrivals of a rate that changes are found through its integral: in a cell of time, in which the rate is
taken as constant, as many requests arrive as the integral passes thresholds. Thresholds one apart make evenly
spaced arrivals, exponentially distributed ones a Poisson process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynaplan.adapters.traces.conversations import PARAMETERS, conversations
from dynaplan.core.engine.draws import uniform_draws
from dynaplan.domain.errors import ConfigError, nearest
from dynaplan.domain.trace import TracedRequest

CELL_S = 0.1
"""The length of a cell of time in which the rate is taken as constant, in seconds."""

NAME = re.compile(r"[A-Za-z]+")
"""A kind of load, known or misspelt; the name of a file has a dot or a slash."""

Numbers = Mapping[str, float]
"""Parameters of a load by their names."""

COMMON: Numbers = {"duration": 600, "isl": 3000, "osl": 150, "isl-cv": 0, "osl-cv": 0, "seed": 1}
"""The parameters of every kind, with their defaults: seconds, tokens, and of the lengths (``isl``, ``osl``)
the standard deviation over the mean (``-cv``)."""


@dataclass(frozen=True)
class LoadKind:
    """One kind of load: its parameters with their defaults, and its rate, in requests/s, at a time in s.

    ``is_conversational``: the requests are turns of conversations, which begin at that rate.
    """

    defaults: Numbers
    rate: Callable[[float, Numbers], float]
    is_poisson: bool = True
    is_conversational: bool = False


def _sinusoid(at_s: float, given: Numbers) -> float:
    """Return a rate that goes from low up to high and back, once a period."""
    return (
        given["low"]
        + (given["high"] - given["low"]) * (1 - math.cos(2 * math.pi * at_s / given["period"])) / 2
    )


KINDS: Mapping[str, LoadKind] = {
    "constant": LoadKind(
        {"rate": 10, "noise": 0.05, "every": 10}, lambda at_s, given: given["rate"], is_poisson=False
    ),
    "poisson": LoadKind({"rate": 10}, lambda at_s, given: given["rate"]),
    "ramp": LoadKind(
        {"low": 5, "high": 20},
        lambda at_s, given: given["low"] + (given["high"] - given["low"]) * at_s / given["duration"],
    ),
    "step": LoadKind(
        {"low": 5, "high": 20, "at": 300},
        lambda at_s, given: given["low"] if at_s < given["at"] else given["high"],
    ),
    "sinusoid": LoadKind({"low": 5, "high": 20, "period": 150}, _sinusoid),
    "onoff": LoadKind(
        {"low": 0, "high": 20, "on": 60, "off": 60},
        lambda at_s, given: (
            given["high"] if at_s % (given["on"] + given["off"]) < given["on"] else given["low"]
        ),
    ),
    "conversations": LoadKind(PARAMETERS, lambda at_s, given: given["rate"], is_conversational=True),
}
"""The kinds of load. Rates are in requests/s, times in s; ``noise`` is the standard deviation of the rate
over the rate, drawn anew ``every`` 10 s unless that says otherwise."""

LEAST = {"period": 0.1, "on": 0.1, "off": 0.1, "every": 0.1, "isl": 1, "osl": 1}
"""The least values of parameters; 0 for the others."""


def is_synthetic(text: str) -> bool:
    """Tell whether the text names made-up load, and not a file; a misspelt kind counts as one."""
    name = text.partition(":")[0]
    return name in KINDS or (NAME.fullmatch(name) is not None and not Path(text).exists())


def synthetic(text: str) -> Iterator[TracedRequest]:
    """Return the requests of made-up load, the same for the same text; ConfigError at once for a wrong text.

    The text is ``KIND`` or ``KIND:key=value,...``; parameters that it leaves out have their defaults.
    """
    name, _, parameters = text.partition(":")
    if name not in KINDS:
        hint = f"{nearest(name, KINDS)} There is no file {text!r} either."
        raise ConfigError(f"{text!r}: no load is called {name!r}", hint=hint)
    kind = KINDS[name]
    return _requests(kind, _numbers(text, parameters, {**COMMON, **kind.defaults}))


def _numbers(text: str, parameters: str, defaults: Numbers) -> Numbers:
    given = {}
    for parameter in filter(None, parameters.split(",")):
        key, _, value = (part.strip() for part in parameter.partition("="))
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
        raise ConfigError(f"{text!r}: {key} is {value!r}", hint=f"Expected a number, {least:g} or more.")
    return number


def _requests(kind: LoadKind, given: Numbers) -> Iterator[TracedRequest]:
    seed = int(given["seed"])
    isl = _lengths(given["isl"], given["isl-cv"], uniform_draws(seed + 1))
    osl = _lengths(given["osl"], given["osl-cv"], uniform_draws(seed + 2))
    if kind.is_conversational:
        yield from conversations(given, (isl, osl))
        return
    for at_s in _arrivals(kind, given, uniform_draws(seed)):
        yield TracedRequest(at_s, next(isl), next(osl))


def _arrivals(kind: LoadKind, given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    """Yield times in seconds, ascending, below the duration."""
    noise = _noise(given, uniform_draws(int(given["seed"]) + 3))
    # Evenly spaced arrivals begin half a space after the beginning.
    expected, threshold = 0.0, _exponential(draws) if kind.is_poisson else 0.5
    for cell in range(math.ceil(given["duration"] / CELL_S)):
        begin_s = cell * CELL_S
        length_s = min(CELL_S, given["duration"] - begin_s)
        rate = kind.rate(begin_s + length_s / 2, given) * next(noise)
        while rate > 0 and expected + rate * length_s > threshold:
            yield begin_s + (threshold - expected) / rate
            threshold += _exponential(draws) if kind.is_poisson else 1.0
        expected += rate * length_s


def _noise(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    """Yield the factor on the rate of each cell."""
    if not given.get("noise"):
        while True:
            yield 1.0
    cells = max(1, round(given["every"] / CELL_S))
    while True:
        factor = max(0.0, 1 + given["noise"] * _normal(draws))
        for _ in range(cells):
            yield factor


def _lengths(mean: float, variation: float, draws: Iterator[float]) -> Iterator[int]:
    """Yield lengths in tokens, at least 1: all the same, or lognormal with that mean and variation."""
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
    """Return a draw of the standard normal distribution, by Box and Muller (1958)."""
    radius = math.sqrt(2 * _exponential(draws))
    return radius * math.cos(2 * math.pi * next(draws))
