"""Pools of engine models in virtual time, and made-up requests: what the predictions are held against.

Copies of real behaviour: prefill workers pull from one queue, hold a few prompts each, and begin the next
step with what they hold at that moment; decode workers get requests by turns.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from dynaplan.contract.traffic import Lengths
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest
from dynaplan.planner.model import Demand
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from dynaplan.simulation.pools import SimulatedEngine


class Arrival(NamedTuple):
    """One request: seconds since the start, and its tokens."""

    at_s: float
    isl: int
    osl: int


class Shape(NamedTuple):
    """Lengths of prompts and answers: lognormal, by mean and coefficient of variation."""

    isl: float = 1155
    isl_variation: float = 0.96
    osl: float = 211
    osl_variation: float = 0.77


def arrivals(shape: Shape, rate_per_s: float, number: int, seed: int = 1) -> list[Arrival]:
    """Poisson arrivals, the same for the same seed."""
    dice = random.Random(seed)
    at_s, made = 0.0, []
    for _ in range(number):
        at_s += dice.expovariate(rate_per_s)
        isl = _lognormal(dice, shape.isl, shape.isl_variation, 14_000)
        made.append(Arrival(at_s, isl, _lognormal(dice, shape.osl, shape.osl_variation, 2000)))
    return made


def demand_of(requests: Sequence[Arrival], rate_per_s: float) -> Demand:
    """What a planner would know of them: the rate, and the histograms of their lengths."""
    return Demand(
        rate_per_s,
        Lengths.of([each.isl for each in requests]),
        Lengths.of([each.osl for each in requests]),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many per cent do not exceed."""
    return sorted(values)[math.ceil(percent / 100 * len(values)) - 1]


def prefill_times_ms(kind: WorkerKind, workers: int, requests: Sequence[Arrival]) -> list[float]:
    """From arrival to the end of the prefill, for all but the first tenth of the requests."""
    return _PrefillPool(kind, workers, requests).run()[len(requests) // 10 :]


def prefill_ends_s(kind: WorkerKind, workers: int, requests: Sequence[Arrival]) -> list[float]:
    """When the prefill of each request ends, in seconds since the start."""
    times_ms = _PrefillPool(kind, workers, requests).run()
    return [each.at_s + time_ms / 1000 for each, time_ms in zip(requests, times_ms, strict=True)]


class _PrefillPool:
    def __init__(self, kind: WorkerKind, workers: int, requests: Sequence[Arrival]) -> None:
        self._most_held = kind.concurrent_prefills
        self._requests = requests
        self._models = [EngineModel(kind.settings, kind.timing) for _ in range(workers)]
        self._held = [0] * workers
        self._is_stepping = [False] * workers
        self._queue: deque[int] = deque()
        self._ends: list[tuple[float, int, int, list[int]]] = []
        self._done_s: dict[int, float] = {}

    def run(self) -> list[float]:
        for key, arrival in enumerate(self._requests):
            while self._ends and self._ends[0][0] <= arrival.at_s:
                self._end_step()
            self._queue.append(key)
            self._hand_out(arrival.at_s)
        while self._ends:
            self._end_step()
        return [1000 * (self._done_s[key] - each.at_s) for key, each in enumerate(self._requests)]

    def _end_step(self) -> None:
        at_s, _, worker, finished = heappop(self._ends)
        self._is_stepping[worker] = False
        self._held[worker] -= len(finished)
        self._done_s.update(dict.fromkeys(finished, at_s))
        self._begin_step(worker, at_s)
        self._hand_out(at_s)

    def _hand_out(self, at_s: float) -> None:
        given = set()
        while self._queue and min(self._held) < self._most_held:
            worker = self._held.index(min(self._held))
            key = self._queue.popleft()
            self._held[worker] += 1
            self._models[worker].submit(EngineRequest(str(key), self._requests[key].isl, 1))
            given.add(worker)
        for worker in given:
            self._begin_step(worker, at_s)

    def _begin_step(self, worker: int, at_s: float) -> None:
        if self._is_stepping[worker] or self._models[worker].is_idle:
            return
        model = self._models[worker]
        duration_s = model.step() or 0.0
        self._is_stepping[worker] = True
        finished = [int(each.request_id) for each in model.finished]
        heappush(self._ends, (at_s + duration_s, len(self._done_s), worker, finished))


def decode_times_ms(
    kind: WorkerKind, workers: int, requests: Sequence[Arrival], is_remote: bool
) -> tuple[list[float], list[float]]:
    """TTFTs and mean ITLs of all but the first tenth; remote ones come with their KV entries."""
    first_s: dict[int, float] = {}
    last_s: dict[int, float] = {}

    def note_first(key: str, at_s: float) -> None:
        first_s.setdefault(int(key), at_s)

    def note_last(key: str, at_s: float) -> None:
        last_s[int(key)] = at_s

    engines = [
        SimulatedEngine(EngineModel(kind.settings, kind.timing), note_first, note_last)
        for _ in range(workers)
    ]
    for key, each in enumerate(requests):
        engine = engines[key % workers]
        engine.advance(each.at_s)
        engine.submit(EngineRequest(str(key), each.isl, each.osl, is_remote=is_remote), each.at_s)
    for engine in engines:
        engine.advance(math.inf)
    counted = range(len(requests) // 10, len(requests))
    return (
        [1000 * (first_s[key] - requests[key].at_s) for key in counted],
        [
            1000 * (last_s[key] - first_s[key]) / (requests[key].osl - 1)
            for key in counted
            if requests[key].osl > 1
        ],
    )


def _lognormal(dice: random.Random, mean: float, variation: float, most: int) -> int:
    sigma = math.sqrt(math.log1p(variation**2))
    return min(max(2, round(dice.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))), most)
