"""Quick models of one pool of workers, a window at a time: who misses a target at that number of workers.

They leave out what hardly matters (KV blocks, chunks, the router's choice, the other pool), so that one
request costs microseconds and a change of the schedule is tried on a few windows only. The oracle tunes their
limits until they agree with the simulation, and believes only the simulation.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from dynaplan.core.engine.settings import EngineSettings
from dynaplan.core.engine.timing import StepTiming
from dynaplan.domain.lifecycle import Role
from dynaplan.simulator.oracle.requests import Requests
from dynaplan.simulator.service import ServiceSettings

KV_BUCKET_BITS = 12
"""The time of a decode step is remembered for every 4096 tokens of KV."""


@dataclass
class Limits:
    """What a request must keep in the models, in seconds; tuned so that they count what really misses."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class Seen:
    """The numbers of the requests that missed, and how long workers that left kept their GPUs, together.

    With ``ttft_s`` and ``itl_s`` the time of every request is noted under its number.
    """

    ttft: list[int] = field(default_factory=list)
    itl: list[int] = field(default_factory=list)
    drain_s: float = 0.0
    ttft_s: array[float] | None = None
    itl_s: array[float] | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """What a stretch of a schedule misses, and how long its leaving workers hold GPUs."""

    ttft: int = 0
    itl: int = 0
    drain_s: float = 0.0

    def __add__(self, other: Total) -> Total:
        return Total(self.ttft + other.ttft, self.itl + other.itl, self.drain_s + other.drain_s)

    def __sub__(self, other: Total) -> Total:
        return Total(self.ttft - other.ttft, self.itl - other.itl, self.drain_s - other.drain_s)


class PoolModel(Protocol):
    """The workers of one role. A state is what they have to do at the beginning of a window."""

    settle_windows: int
    """So long a change is felt at least."""

    def empty(self) -> Any:
        """The state of no workers yet."""
        ...

    def copy(self, state: Any) -> Any:
        """The same state once more."""
        ...

    def run(self, state: Any, window: int, workers: int, seen: Seen) -> None:
        """Let a window pass with so many workers; the state becomes that at its end.

        The end of the last window is when everything is answered.
        """
        ...


@dataclass(slots=True)
class _Prefiller:
    """One worker: the prompts in its step, and those it holds for the next one."""

    step: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Prefills:
    """``serving`` workers, by number, ask for work in turns; ``steps`` are those under way, by their end."""

    workers: dict[int, _Prefiller] = field(default_factory=dict)
    serving: list[int] = field(default_factory=list)
    asking: deque[int] = field(default_factory=deque)
    steps: list[tuple[float, int]] = field(default_factory=list)
    given: int = -1
    number: int = 0


class PrefillModel:
    """Prefill workers as ``PrefillQueue`` has them: a step takes what its worker holds when it begins."""

    settle_windows = 1

    def __init__(self, requests: Requests, settings: ServiceSettings, limits: Limits) -> None:
        self._requests = requests
        self._most_held = settings.concurrent_prefills
        self._limits = limits

    def empty(self) -> _Prefills:
        """No workers, nothing begun."""
        return _Prefills()

    def copy(self, state: _Prefills) -> _Prefills:
        """The same once more."""
        workers = {
            number: _Prefiller(each.step.copy(), each.held.copy()) for number, each in state.workers.items()
        }
        return _Prefills(
            workers,
            state.serving.copy(),
            state.asking.copy(),
            state.steps.copy(),
            state.given,
            state.number,
        )

    def run(self, state: _Prefills, window: int, workers: int, seen: Seen) -> None:
        """Let the window pass. Workers that leave, the newest first, compute what they hold."""
        requests = self._requests
        start_s = window * float(requests.width_s)
        end_s = start_s + requests.width_s if window + 1 < requests.windows else math.inf
        if state.given < 0:
            state.given = requests.first[window]
        while len(state.serving) < workers:
            state.workers[state.number] = _Prefiller()
            state.serving.append(state.number)
            state.asking.append(state.number)
            state.number += 1
        while len(state.serving) > workers:
            leaving = state.serving.pop()
            if leaving in state.asking:
                state.asking.remove(leaving)
        self._run(state, start_s, end_s, seen)

    def _run(self, state: _Prefills, now_s: float, end_s: float, seen: Seen) -> None:
        arrival_s, asking, steps, workers = self._requests.arrival_s, state.asking, state.steps, state.workers
        count, most_held = len(arrival_s), self._most_held
        while True:
            next_s = max(arrival_s[state.given], now_s) if asking and state.given < count else math.inf
            if steps and steps[0][0] <= next_s:
                if steps[0][0] >= end_s:
                    return
                now_s, number = heappop(steps)
                self._end(state, number, now_s, seen)
                continue
            if next_s >= end_s:
                return
            now_s, number = next_s, asking.popleft()
            worker = workers[number]
            worker.held.append(state.given)
            state.given += 1
            if len(worker.held) + len(worker.step) < most_held:
                asking.append(number)
            if not worker.step:
                self._begin(state, number, now_s)

    def _begin(self, state: _Prefills, number: int, now_s: float) -> None:
        worker, prefill_s = state.workers[number], self._requests.prefill_s
        worker.step, worker.held = worker.held, []
        end_s = now_s + self._requests.fixed_s
        for each in worker.step:
            end_s += prefill_s[each]
        heappush(state.steps, (end_s, number))

    def _end(self, state: _Prefills, number: int, now_s: float, seen: Seen) -> None:
        requests, limit_s, worker = self._requests, self._limits.ttft_s, state.workers[number]
        for each in worker.step:
            ttft_s = now_s - requests.arrival_s[each] + requests.rest_s[each]
            if ttft_s > limit_s:
                seen.ttft.append(each)
            if seen.ttft_s is not None:
                seen.ttft_s[each] = ttft_s
        was_full = len(worker.step) + len(worker.held) >= self._most_held
        worker.step = []
        if worker.held:
            self._begin(state, number, now_s)
        if was_full and number in state.serving:
            state.asking.append(number)


@dataclass(slots=True)
class _Decoder:
    """One worker: its clock counts decode steps; ``batch`` has (clock at the end, number, joined at)."""

    now_s: float
    clock: float = 0.0
    kv_tokens: float = 0.0
    batch: list[tuple[float, int, float]] = field(default_factory=list)

    def copy(self) -> _Decoder:
        return _Decoder(self.now_s, self.clock, self.kv_tokens, self.batch.copy())


class DecodeModel:
    """Decode workers: requests go round them, and every step decodes a token of each that is there.

    Aggregated ones compute a prompt as soon as it comes, while the others there wait.
    """

    def __init__(self, requests: Requests, settings: ServiceSettings, limits: Limits) -> None:
        self._engine: EngineSettings
        self._timing: StepTiming
        self._engine, self._timing = settings.engines[Role.DECODE]
        self._is_aggregated = Role.PREFILL not in settings.engines
        self._requests = requests
        self._limits = limits
        self._kv_tokens = self._engine.total_blocks * self._engine.block_tokens
        self._step_s: dict[int, float] = {}
        mean_steps = sum(requests.steps) / max(1, len(requests.steps))
        life_s = 2 * mean_steps * settings.slo.itl_ms / 1000
        self.settle_windows = 1 + math.ceil(min(life_s, 60) / requests.width_s)

    def empty(self) -> list[_Decoder]:
        """No workers."""
        return []

    def copy(self, state: list[_Decoder]) -> list[_Decoder]:
        """The same once more."""
        return [each.copy() for each in state]

    def run(self, state: list[_Decoder], window: int, workers: int, seen: Seen) -> None:
        """Let the window's requests join. Workers that leave answer what they have, and keep their GPUs."""
        requests = self._requests
        start_s = window * float(requests.width_s)
        for leaving in state[workers:]:
            self._advance(leaving, start_s, seen)
            if leaving.batch:
                self._advance(leaving, math.inf, seen)
                seen.drain_s += max(0.0, min(leaving.now_s, requests.end_s) - start_s)
        del state[workers:]
        state += [_Decoder(start_s) for _ in range(workers - len(state))]
        for number in range(requests.first[window], requests.first[window + 1]):
            self._join(state[number % workers], number, seen)
        if window + 1 == requests.windows:
            for each in state:
                self._advance(each, math.inf, seen)

    def _join(self, worker: _Decoder, number: int, seen: Seen) -> None:
        requests = self._requests
        arrival_s, prompt, steps = (
            requests.arrival_s[number],
            requests.prompt_tokens[number],
            requests.steps[number],
        )
        self._advance(worker, arrival_s, seen)
        batch = worker.batch
        while batch and (
            worker.kv_tokens + prompt >= self._kv_tokens or len(batch) >= self._engine.request_slots
        ):
            self._advance(worker, math.inf, seen, until_someone_ends=True)
        waited_s = worker.now_s - arrival_s
        if self._is_aggregated:
            self._compute(worker, number)
        if waited_s > 0 or self._is_aggregated:
            self._note_ttft(worker, number, waited_s, seen)
        if steps:
            worker.kv_tokens += prompt
            heappush(batch, (worker.clock + steps, number, worker.now_s))

    def _compute(self, worker: _Decoder, number: int) -> None:
        requests, others = self._requests, len(worker.batch)
        worker.now_s += requests.fixed_s + requests.prefill_s[number]
        if others:
            worker.now_s += self._decode_s(others, worker.kv_tokens)
            worker.clock += 1
            worker.kv_tokens += others

    def _note_ttft(self, worker: _Decoder, number: int, waited_s: float, seen: Seen) -> None:
        requests = self._requests
        if self._is_aggregated:
            ttft_s = worker.now_s - requests.arrival_s[number]
            if seen.ttft_s is not None:
                seen.ttft_s[number] = ttft_s
        else:
            ttft_s = waited_s + requests.fixed_s + requests.prefill_s[number] + requests.rest_s[number]
        if ttft_s > self._limits.ttft_s:
            seen.ttft.append(number)

    def _advance(
        self, worker: _Decoder, until_s: float, seen: Seen, until_someone_ends: bool = False
    ) -> None:
        batch, prompt_tokens, all_steps = worker.batch, self._requests.prompt_tokens, self._requests.steps
        now_s, clock, kv_tokens = worker.now_s, worker.clock, worker.kv_tokens
        while batch and now_s < until_s:
            count = len(batch)
            steps = max(0.0, batch[0][0] - clock)
            step_s = self._decode_s(count, kv_tokens + count * steps / 2)
            if steps * step_s > until_s - now_s:
                steps = (until_s - now_s) / step_s
                clock, kv_tokens, now_s = clock + steps, kv_tokens + count * steps, until_s
                break
            clock, kv_tokens, now_s = clock + steps, kv_tokens + count * steps, now_s + steps * step_s
            while batch and batch[0][0] <= clock + 1e-6:
                _, number, joined_s = heappop(batch)
                own_steps = all_steps[number]
                kv_tokens -= prompt_tokens[number] + own_steps
                itl_s = (now_s - joined_s) / own_steps
                if itl_s > self._limits.itl_s:
                    seen.itl.append(number)
                if seen.itl_s is not None:
                    seen.itl_s[number] = itl_s
            if until_someone_ends:
                until_s = now_s
        worker.now_s = max(now_s, until_s) if until_s < math.inf else now_s
        worker.clock, worker.kv_tokens = clock, max(0.0, kv_tokens)

    def _decode_s(self, requests: int, kv_tokens: float) -> float:
        bucket = int(kv_tokens) >> KV_BUCKET_BITS
        key = requests << 32 | bucket
        step_s = self._step_s.get(key)
        if step_s is None:
            middle = (bucket + 0.5) * (1 << KV_BUCKET_BITS)
            step_s = self._step_s[key] = max(self._timing.decode_ms(requests, middle) / 1000, 1e-6)
        return step_s
