"""Load on several models: chains of calls, each call to one model, made up or of a trace with models.

A *chain* is one client that waits for each answer before it asks again: an agent, or a person. So what it
asks depends on how long it waited. A request that comes by itself is a chain of one call.

| kind | what comes |
|---|---|
| ``popularity`` | single requests, a Poisson process; the models' shares follow Zipf's law: the i-th is asked
``i ** -skew`` as often as the first (Aegaeon, SOSP 2025: 17.7 % of the GPUs served 1.35 % of the requests) |
| ``groups`` | each model sleeps and wakes: bursts of requests with pauses, both exponential, each model by
itself (the bursty groups of Prism, 2505.04021) | | ``agents`` | closed loops: an orchestrator that asks its
own model before and after each of its helpers', A B A C, the helpers' models in turn, a while to think
between (llama-swap PR 611) |
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.traces.bursts import exponential, lengths
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.splitmix import UniformDraws


@dataclass(frozen=True)
class ChainCall:
    """One request of a chain: to ``model``, asked ``think_s`` after the answer before it."""

    model: str
    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Calls one after another, the first at ``begin_s``; none begins at ``end_s`` or later."""

    begin_s: float
    calls: Iterable[ChainCall]
    end_s: float


Numbers = Mapping[str, float]

COMMON: Numbers = {"duration": 3600, "isl": 1000, "osl": 200, "isl-cv": 0.5, "osl-cv": 0.5, "seed": 1}
"""Seconds, tokens, and of the lengths the standard deviation over the mean."""


MIN_NUMBER, MAX_NUMBER = 0.001, 1e9
"""The bounds of parameters; a variation and a skew may be 0."""


def chains_of(requests: Iterable[TracedRequest], names: Iterable[str]) -> Iterator[Chain]:
    """Yield a trace's requests as chains of one call.

    Raises ConfigError for a request of a model that is not one of ``names``.
    """
    known = set(names)
    for request in requests:
        if request.model not in known:
            raise ConfigError(
                f"the trace's request at {request.arrival_s:g} s is for the model {request.model!r}",
                hint=f"Expected a model of the simulation. {nearest(request.model, known)}",
            )
        call = ChainCall(request.model, request.prompt_tokens, request.output_tokens)
        yield Chain(request.arrival_s, (call,), request.arrival_s + 1.0)


def is_made_up(text: str) -> bool:
    return text.partition(":")[0] in KINDS


def made_up(text: str, names: list[str], seed: int) -> Iterator[Chain]:
    """Return the chains of ``KIND:key=value,...``; raises ConfigError for a wrong parameter."""
    make = KINDS[text.partition(":")[0]][1]
    return make(_numbers(text, seed), names)


def length_s(text: str) -> float:
    """Return for how many seconds the made-up load lasts; ConfigError for a wrong parameter."""
    return _numbers(text, 1)["duration"]


def _numbers(text: str, seed: int) -> Numbers:
    kind, _, parameters = text.partition(":")
    given = {**COMMON, "seed": seed, **KINDS[kind][0]}
    for parameter in filter(None, parameters.split(",")):
        key, _, value = (part.strip() for part in parameter.partition("="))
        if key not in given:
            raise ConfigError(f"{text!r} has no {key!r}", hint=nearest(key, given))
        least = 0.0 if key.endswith("-cv") or key == "skew" else MIN_NUMBER
        try:
            given[key] = float(value)
        except ValueError:
            given[key] = -1.0
        if not least <= given[key] <= MAX_NUMBER:
            raise ConfigError(
                f"{text!r}: {key} is {value!r}", hint=f"Expected a number from {least:g} to {MAX_NUMBER:g}."
            )
    return given


def _calls(given: Numbers, stream: int) -> Callable[[str, float], ChainCall]:
    """Return a function that makes a call of a model after a pause (s), with drawn lengths."""
    seed = int(given["seed"]) * 1000 + stream
    prompts = lengths(given["isl"], given["isl-cv"], UniformDraws(seed))
    answers = lengths(given["osl"], given["osl-cv"], UniformDraws(seed + 500))
    return lambda model, think_s: ChainCall(model, next(prompts), next(answers), think_s)


def _popularity(given: Numbers, names: list[str]) -> Iterator[Chain]:
    draws, call = UniformDraws(int(given["seed"])), _calls(given, 1)
    bounds = list(accumulate((rank + 1) ** -given["skew"] for rank in range(len(names))))
    at_s = exponential(draws) / given["rate"]
    while at_s < given["duration"]:
        name = names[bisect(bounds, next(draws) * bounds[-1], hi=len(names) - 1)]
        yield Chain(at_s, (call(name, 0.0),), given["duration"])
        at_s += exponential(draws) / given["rate"]


def _groups(given: Numbers, names: list[str]) -> Iterator[Chain]:
    streams = (_bursts_of(name, index, given) for index, name in enumerate(names))
    return merge(*streams, key=lambda chain: chain.begin_s)


def _bursts_of(name: str, index: int, given: Numbers) -> Iterator[Chain]:
    draws, call = UniformDraws(int(given["seed"]) * 1000 + index), _calls(given, 10 + index)
    begin_s = exponential(draws) * given["pause"]
    while begin_s < given["duration"]:
        end_s = min(begin_s + exponential(draws) * given["burst"], given["duration"])
        at_s = begin_s
        while at_s < end_s:
            yield Chain(at_s, (call(name, 0.0),), given["duration"])
            at_s += exponential(draws) / given["rate"]
        begin_s = end_s + exponential(draws) * given["pause"]


def _agents(given: Numbers, names: list[str]) -> Iterator[Chain]:
    for index in range(int(given["agents"])):
        draws = UniformDraws(int(given["seed"]) * 1000 + index)
        yield Chain(0.0, _turns(given, names, index, draws), given["duration"])


def _turns(given: Numbers, names: list[str], index: int, draws: Iterator[float]) -> Iterator[ChainCall]:
    """Yield A B A C A D ... without end: the first model between each of the others."""
    call = _calls(given, 100 + index)
    own, helpers = names[0], names[1:] or names
    turn = index
    while True:
        for model in (own, helpers[turn % len(helpers)]):
            yield call(model, exponential(draws) * given["think"])
        turn += 1


KINDS: Mapping[str, tuple[Numbers, Callable[[Numbers, list[str]], Iterator[Chain]]]] = {
    "popularity": ({"rate": 0.2, "skew": 1.2}, _popularity),
    "groups": ({"rate": 0.2, "burst": 120, "pause": 600}, _groups),
    "agents": ({"agents": 3, "think": 5}, _agents),
}
"""The kinds with their parameters and defaults: requests per second (of each model in a burst for
``groups``), mean seconds of bursts, pauses and thinking."""
