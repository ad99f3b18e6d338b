"""Made-up load, from a line of text like ``sinusoid:low=5,high=20,period=150,duration=600,isl=3000,osl=150``.

The arrivals of a rate that changes are found through its integral: in a cell of time, in which the rate is
taken as constant, as many requests arrive as the integral passes thresholds. Thresholds one apart make evenly
spaced arrivals, exponentially distributed ones a Poisson process. Bursts are in ``bursts.py``.

**Conversations** have prompts that grow turn by turn, all behind the same system prompt. A turn's prompt is
the system prompt, every question and answer before it, and a new question. So all of it but the question was
in the prompts and answers before. The next turn comes when the answer has been read: a second for every
``READ_TOKENS_PER_S`` tokens of it, and a pause for thinking.

Blocks have ids in place of hashes: the number of a conversation and the place in it. Blocks within the system
prompt have one id in all conversations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.traces.bursts import BURSTS, Arrivals, Numbers, exponential, lengths, normal
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.splitmix import UniformDraws

BLOCK_TOKENS = 16
"""The tokens of a block, as engines have them."""

READ_TOKENS_PER_S = 50.0
"""The tokens of an answer that are generated and read in a second."""

PARAMETERS: Mapping[str, float] = {"rate": 1, "turns": 6, "system": 1000, "think": 20, "isl": 200, "osl": 200}
"""The parameters with their defaults: new conversations/s, turns of each on average, tokens of the system
prompt, seconds of thinking on average, and tokens of each question and answer."""

PLACES = 1 << 40
"""The places of blocks in a conversation: more than any has."""


def conversations(
    given: Mapping[str, float], lengths: tuple[Iterator[int], Iterator[int]]
) -> Iterator[TracedRequest]:
    """Yield the turns of all conversations in the order of their arrival; none begins after the duration.

    Conversations begin as a Poisson process. Their numbers of turns are geometrically distributed, and
    pauses exponentially. ``lengths`` are of questions and of answers.
    """
    draws = UniformDraws(int(given["seed"]))
    questions, answers = lengths
    coming: list[tuple[float, int, int]] = []
    begin_s, number = _until_next(draws, given["rate"]), 0
    goes_on = 1 - 1 / max(given["turns"], 1.0)
    while True:
        while begin_s < given["duration"] and (not coming or begin_s <= coming[0][0]):
            number += 1
            heappush(coming, (begin_s, number, int(given["system"])))
            begin_s += _until_next(draws, given["rate"])
        if not coming or coming[0][0] >= given["duration"]:
            return
        at_s, conversation, context = heappop(coming)
        prompt, answer = context + next(questions), next(answers)
        yield TracedRequest(
            at_s, prompt, answer, _blocks(conversation, prompt, int(given["system"])), BLOCK_TOKENS
        )
        after_s = at_s + answer / READ_TOKENS_PER_S + given["think"] * exponential(draws)
        if next(draws) < goes_on:
            heappush(coming, (after_s, conversation, prompt + answer))


def _blocks(conversation: int, prompt_tokens: int, system_tokens: int) -> tuple[int, ...]:
    shared, full = system_tokens // BLOCK_TOKENS, prompt_tokens // BLOCK_TOKENS
    own = conversation * PLACES
    return (*range(min(shared, full)), *range(own + shared, own + full))


def _until_next(draws: Iterator[float], rate: float) -> float:
    """Return the seconds until the next conversation begins; without a rate none ever does."""
    return exponential(draws) / rate if rate else math.inf


CELL_S = 0.1
"""The length of a cell of time in which the rate is taken as constant, in seconds."""

NAME = re.compile(r"[A-Za-z]+")
"""A kind of load, known or misspelt; the name of a file has a dot or a slash."""

COMMON: Numbers = {"duration": 600, "isl": 3000, "osl": 150, "isl-cv": 0, "osl-cv": 0, "seed": 1}
"""The parameters of every kind, with their defaults: seconds, tokens, and of the lengths (``isl``, ``osl``)
the standard deviation over the mean (``-cv``)."""


Rate = Callable[[float, Numbers], float]
"""The rate of a load, in requests/s, at a time in seconds."""


@dataclass(frozen=True)
class LoadKind:
    """One kind of load: its parameters with their defaults, and the times of its arrivals.

    Without ``arrivals`` the requests are turns of conversations.
    """

    defaults: Numbers
    arrivals: Arrivals | None = None


def _sinusoid(at_s: float, given: Numbers) -> float:
    """Return a rate that goes from low up to high and back, once a period."""
    return (
        given["low"]
        + (given["high"] - given["low"]) * (1 - math.cos(2 * math.pi * at_s / given["period"])) / 2
    )


def _poisson(rate: Rate) -> Arrivals:
    return lambda given, draws: _passing(rate, given, lambda: exponential(draws), exponential(draws))


def _evenly(rate: Rate) -> Arrivals:
    """Return arrivals at even distances, half of one after the beginning on."""
    return lambda given, _: _passing(rate, given, lambda: 1.0, 0.5)


def _passing(rate: Rate, given: Numbers, distance: Callable[[], float], first: float) -> Iterator[float]:
    """Yield the times at which the integral of the rate passes ``first``, and then every ``distance()``."""
    noise = _noise(given, UniformDraws(int(given["seed"]) + 3))
    expected, threshold = 0.0, first
    for cell in range(math.ceil(given["duration"] / CELL_S)):
        begin_s = cell * CELL_S
        length_s = min(CELL_S, given["duration"] - begin_s)
        now = rate(begin_s + length_s / 2, given) * next(noise)
        while now > 0 and expected + now * length_s > threshold:
            yield begin_s + (threshold - expected) / now
            threshold += distance()
        expected += now * length_s


def _noise(given: Numbers, draws: Iterator[float]) -> Iterator[float]:
    """Yield the factor on the rate of each cell."""
    if not given.get("noise"):
        while True:
            yield 1.0
    cells = max(1, round(given["every"] / CELL_S))
    while True:
        factor = max(0.0, 1 + given["noise"] * normal(draws))
        for _ in range(cells):
            yield factor


KINDS: Mapping[str, LoadKind] = {
    "constant": LoadKind({"rate": 10, "noise": 0.05, "every": 10}, _evenly(lambda _, given: given["rate"])),
    "poisson": LoadKind({"rate": 10}, _poisson(lambda _, given: given["rate"])),
    "ramp": LoadKind(
        {"low": 5, "high": 20},
        _poisson(
            lambda at_s, given: given["low"] + (given["high"] - given["low"]) * at_s / given["duration"]
        ),
    ),
    "step": LoadKind(
        {"low": 5, "high": 20, "at": 300},
        _poisson(lambda at_s, given: given["low"] if at_s < given["at"] else given["high"]),
    ),
    "sinusoid": LoadKind({"low": 5, "high": 20, "period": 150}, _poisson(_sinusoid)),
    "onoff": LoadKind(
        {"low": 0, "high": 20, "on": 60, "off": 60},
        _poisson(
            lambda at_s, given: (
                given["high"] if at_s % (given["on"] + given["off"]) < given["on"] else given["low"]
            )
        ),
    ),
    **{name: LoadKind(defaults, arrivals) for name, (defaults, arrivals) in BURSTS.items()},
    "conversations": LoadKind(PARAMETERS),
}
"""The kinds of load. Rates are in requests/s, times in s; ``noise`` is the standard deviation of the rate
over the rate, drawn anew ``every`` 10 s unless that says otherwise."""

MIN_VALUES = {
    **dict.fromkeys(("period", "on", "off", "every", "stay", "think", "fade"), 0.1),
    **dict.fromkeys(("isl", "osl", "size", "people"), 1),
    "tail": 1.05,
    "levels": 2,
}
"""The least values of parameters; 0 for the others."""


def is_synthetic(text: str) -> bool:
    """Tell whether the text names made-up load, and not a file; a misspelt kind counts as one."""
    name = text.partition(":")[0]
    return name in KINDS or (NAME.fullmatch(name) is not None and not Path(text).exists())


def synthetic(text: str, seed: int = 1) -> Iterator[TracedRequest]:
    """Return the requests of made-up load, the same for the same text; ConfigError at once for a wrong text.

    The text is ``KIND`` or ``KIND:key=value,...``; parameters that it leaves out have their defaults, and
    ``seed`` is the given one.
    """
    name, _, parameters = text.partition(":")
    if name not in KINDS:
        meant, known = nearest(name, KINDS), f"Known: {', '.join(KINDS)}."
        hint = f"{meant} {known}" if meant.startswith("Did") else known
        raise ConfigError(
            f"{text!r}: no load is called {name!r}", hint=f"{hint} There is no file {text!r} either."
        )
    kind = KINDS[name]
    return _requests(kind, _numbers(text, parameters, {**COMMON, "seed": seed, **kind.defaults}))


def _numbers(text: str, parameters: str, defaults: Numbers) -> Numbers:
    given = {}
    for parameter in filter(None, parameters.split(",")):
        key, _, value = (part.strip() for part in parameter.partition("="))
        if key not in defaults:
            raise ConfigError(f"{text!r} has no {key!r}", hint=nearest(key, defaults))
        given[key] = _number(text, key, value)
    return {**defaults, **given}


def _number(text: str, key: str, value: str) -> float:
    least = MIN_VALUES.get(key, 0)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise ConfigError(f"{text!r}: {key} is {value!r}", hint=f"Expected a number, {least:g} or more.")
    return number


def _requests(kind: LoadKind, given: Numbers) -> Iterator[TracedRequest]:
    seed = int(given["seed"])
    isl = lengths(given["isl"], given["isl-cv"], UniformDraws(seed + 1))
    osl = lengths(given["osl"], given["osl-cv"], UniformDraws(seed + 2))
    if kind.arrivals is None:
        yield from conversations(given, (isl, osl))
        return
    for at_s in kind.arrivals(given, UniformDraws(seed)):
        yield TracedRequest(at_s, next(isl), next(osl))
