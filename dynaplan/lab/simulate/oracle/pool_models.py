"""Quick models of one pool of workers: the requests that miss a target, a window at a time.

A model is run window by window from a state, the work that its workers have at the beginning of the window,
so a change of the schedule is followed from the window where it begins. A request costs microseconds. For
P, T and D see the package's page.

Prefill (``PrefillModel``). Workers ask for prompts in turns, first come first served, and hold at most P
each. A step takes all prompts that its worker holds when it begins, and lasts T(0) + the sum of their
T(prompt) - T(0), or T(prompt) - T(cached tokens) by ``PromptCosts``. A prompt's TTFT is the end of its step -
its arrival + ``TraceArrays.rest_s`` (hand-off and first decode steps, the same for every schedule).

Decode (``DecodeModel``). Requests go to the workers in turns, and come at their arrival, as if prefill took
no time. A step of a worker's batch of b requests with kv tokens of context takes D(b, kv), and gives each of
them one token. Between two events (a request joins, one ends) the steps are taken to be equally long, at the
mean kv of that time. A request joins at once where KV tokens and slots allow, and otherwise waits, first come
first served, for an end; if that wait, its prompt alone and ``rest_s`` exceed the TTFT target, it counts as a
miss of TTFT, also when the prefill model counts it too (its prompt as with one prefill worker). Its ITL is
the time from joining to the end over its decode steps. An aggregated worker computes the prompt when the
request joins, while its batch makes one step; the TTFT is the end of that - the arrival.

Left out: paging of KV blocks and preemption, prompts in chunks, the router's choice, refusals, the prefill
queue's limit (every prompt is computed remotely), and waiting of hand-offs. ``oracle`` makes up for their
effect on the number of misses, by tuning ``LatencyLimits`` to each simulation; which requests miss it
cannot correct.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Protocol

from dynaplan.engines.timing_model.settings import EngineSettings
from dynaplan.engines.timing_model.timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.prompt_costs import PromptCosts
from dynaplan.lab.simulate.oracle.trace_arrays import TraceArrays
from dynaplan.simulation.service import ServiceSettings

KV_BUCKET_BITS = 12
"""Binary digits of KV tokens that share one remembered time of a decode step: one for every 4096 tokens."""

LONGEST_SETTLING_S = 60
"""The most seconds for which a change of a decode pool is always followed. Otherwise it is the length of two
mean answers at the ITL target; rounded up to windows, and one more, this is ``settle_windows``."""


@dataclass
class LatencyLimits:
    """The TTFT and the ITL in seconds beyond which the models count a miss: the targets, tuned."""

    ttft_s: float
    itl_s: float


@dataclass(slots=True)
class MissLog:
    """Notes of a model as it runs: the numbers of the requests that miss each target.

    ``drain_s`` are the worker-seconds, until the last arrival, that decode workers took to leave; prefill
    workers leave within a step or two, which is not counted. With ``ttft_s`` and ``itl_s`` the latency of
    every request is noted too, at its number.
    """

    ttft: list[int] = field(default_factory=list)
    itl: list[int] = field(default_factory=list)
    drain_s: float = 0.0
    ttft_s: array[float] | None = None
    itl_s: array[float] | None = None


@dataclass(frozen=True, slots=True)
class Misses:
    """The numbers of requests that miss each target, and the worker-seconds that workers take to leave."""

    ttft: int = 0
    itl: int = 0
    drain_s: float = 0.0

    def __add__(self, other: Misses) -> Misses:
        return Misses(self.ttft + other.ttft, self.itl + other.itl, self.drain_s + other.drain_s)

    def __sub__(self, other: Misses) -> Misses:
        return Misses(self.ttft - other.ttft, self.itl - other.itl, self.drain_s - other.drain_s)


class PoolModel(Protocol):
    """The workers of one role. A state is the work that they have at the beginning of a window."""

    settle_windows: int
    """The number of windows after a change that are modelled before it may be taken to have ended: 1 for
    prefill, by ``LONGEST_SETTLING_S`` for decode."""

    def empty(self) -> Any:
        """Return the state of a pool that has no worker and no request."""
        ...

    def copy(self, state: Any) -> Any:
        """Return a copy of the state."""
        ...

    def run(self, state: Any, window: int, workers: int, log: MissLog) -> None:
        """Let a window pass with that number of workers; the state becomes that at its end.

        The last window ends when every request is answered.
        """
        ...


@dataclass(slots=True)
class _PrefillWorker:
    """One worker: the prompts in its step, and the prompts that it holds for the next one."""

    step: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _PrefillState:
    """The workers by number: ``serving`` ones, and the turns of those ``asking`` for a prompt.

    ``steps`` under way are (end in seconds, worker), the next to end first; ``given`` is the next prompt.
    """

    workers: dict[int, _PrefillWorker] = field(default_factory=dict)
    serving: list[int] = field(default_factory=list)
    asking: deque[int] = field(default_factory=deque)
    steps: list[tuple[float, int]] = field(default_factory=list)
    given: int = -1
    number: int = 0


class PrefillModel:
    """Prefill workers behind one queue, as ``SimulatedPrefillQueue`` gives out its work."""

    settle_windows = 1

    def __init__(
        self, arrays: TraceArrays, settings: ServiceSettings, limits: LatencyLimits, costs: PromptCosts
    ) -> None:
        self._arrays = arrays
        self._costs = costs
        self._most_held = settings.concurrent_prefills
        self._limits = limits

    def empty(self) -> _PrefillState:
        """Return the state of a pool that has no worker and no request."""
        return _PrefillState()

    def copy(self, state: _PrefillState) -> _PrefillState:
        """Return a copy of the state."""
        workers = {
            number: _PrefillWorker(worker.step.copy(), worker.held.copy())
            for number, worker in state.workers.items()
        }
        return _PrefillState(
            workers,
            state.serving.copy(),
            state.asking.copy(),
            state.steps.copy(),
            state.given,
            state.number,
        )

    def run(self, state: _PrefillState, window: int, workers: int, log: MissLog) -> None:
        """Let the window pass. Workers leave the newest first, and compute the prompts that they hold."""
        arrays = self._arrays
        start_s = window * float(arrays.width_s)
        end_s = start_s + arrays.width_s if window + 1 < arrays.windows else math.inf
        if state.given < 0:
            state.given = arrays.first[window]
        while len(state.serving) < workers:
            state.workers[state.number] = _PrefillWorker()
            state.serving.append(state.number)
            state.asking.append(state.number)
            state.number += 1
        while len(state.serving) > workers:
            leaving = state.serving.pop()
            if leaving in state.asking:
                state.asking.remove(leaving)
        self._run(state, start_s, end_s, log)

    def _run(self, state: _PrefillState, now_s: float, end_s: float, log: MissLog) -> None:
        arrival_s, asking, steps, workers = self._arrays.arrival_s, state.asking, state.steps, state.workers
        count, most_held = len(arrival_s), self._most_held
        while True:
            next_s = max(arrival_s[state.given], now_s) if asking and state.given < count else math.inf
            if steps and steps[0][0] <= next_s:
                if steps[0][0] >= end_s:
                    return
                now_s, number = heappop(steps)
                self._end(state, number, now_s, log)
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

    def _begin(self, state: _PrefillState, number: int, now_s: float) -> None:
        worker, prefill_s = state.workers[number], self._costs.at(len(state.serving))
        worker.step, worker.held = worker.held, []
        end_s = now_s + self._arrays.fixed_s
        for prompt in worker.step:
            end_s += prefill_s[prompt]
        heappush(state.steps, (end_s, number))

    def _end(self, state: _PrefillState, number: int, now_s: float, log: MissLog) -> None:
        arrays, limit_s, worker = self._arrays, self._limits.ttft_s, state.workers[number]
        for prompt in worker.step:
            ttft_s = now_s - arrays.arrival_s[prompt] + arrays.rest_s[prompt]
            if ttft_s > limit_s:
                log.ttft.append(prompt)
            if log.ttft_s is not None:
                log.ttft_s[prompt] = ttft_s
        was_full = len(worker.step) + len(worker.held) >= self._most_held
        worker.step = []
        if worker.held:
            self._begin(state, number, now_s)
        if was_full and number in state.serving:
            state.asking.append(number)


@dataclass(slots=True)
class _DecodeWorker:
    """One worker: ``clock`` counts its decode steps; ``batch`` has (clock at the end, request, joined at)."""

    now_s: float
    clock: float = 0.0
    kv_tokens: float = 0.0
    batch: list[tuple[float, int, float]] = field(default_factory=list)

    def copy(self) -> _DecodeWorker:
        return _DecodeWorker(self.now_s, self.clock, self.kv_tokens, self.batch.copy())


class DecodeModel:
    """Decode workers, or aggregated ones in a deployment without prefill workers."""

    def __init__(
        self, arrays: TraceArrays, settings: ServiceSettings, limits: LatencyLimits, costs: PromptCosts
    ) -> None:
        self._costs = costs
        self._prefill_s = array("d")
        self._engine: EngineSettings
        self._timing: StepTiming
        self._engine, self._timing = settings.engines[Role.DECODE]
        self._is_aggregated = Role.PREFILL not in settings.engines
        self._arrays = arrays
        self._limits = limits
        self._kv_tokens = self._engine.total_blocks * self._engine.block_tokens
        self._step_s: dict[int, float] = {}
        mean_steps = sum(arrays.steps) / max(1, len(arrays.steps))
        life_s = 2 * mean_steps * settings.slo.itl_ms / 1000
        self.settle_windows = 1 + math.ceil(min(life_s, LONGEST_SETTLING_S) / arrays.width_s)

    def empty(self) -> list[_DecodeWorker]:
        """Return the state of a pool that has no worker and no request."""
        return []

    def copy(self, state: list[_DecodeWorker]) -> list[_DecodeWorker]:
        """Return a copy of the state."""
        return [worker.copy() for worker in state]

    def run(self, state: list[_DecodeWorker], window: int, workers: int, log: MissLog) -> None:
        """Let the window's requests join. Workers that leave answer their batch first, and hold their
        GPUs."""
        arrays = self._arrays
        start_s = window * float(arrays.width_s)
        self._prefill_s = self._costs.at(workers if self._is_aggregated else 1)
        for leaving in state[workers:]:
            self._advance(leaving, start_s, log)
            if leaving.batch:
                self._advance(leaving, math.inf, log)
                log.drain_s += max(0.0, min(leaving.now_s, arrays.end_s) - start_s)
        del state[workers:]
        state += [_DecodeWorker(start_s) for _ in range(workers - len(state))]
        for number in range(arrays.first[window], arrays.first[window + 1]):
            self._join(state[number % workers], number, log)
        if window + 1 == arrays.windows:
            for worker in state:
                self._advance(worker, math.inf, log)

    def _join(self, worker: _DecodeWorker, number: int, log: MissLog) -> None:
        arrays = self._arrays
        arrival_s, prompt, steps = (
            arrays.arrival_s[number],
            arrays.prompt_tokens[number],
            arrays.steps[number],
        )
        self._advance(worker, arrival_s, log)
        batch = worker.batch
        while batch and (
            worker.kv_tokens + prompt >= self._kv_tokens or len(batch) >= self._engine.request_slots
        ):
            self._advance(worker, math.inf, log, until_an_end=True)
        waited_s = worker.now_s - arrival_s
        if self._is_aggregated:
            self._compute(worker, number)
        if waited_s > 0 or self._is_aggregated:
            self._note_ttft(worker, number, waited_s, log)
        if steps:
            worker.kv_tokens += prompt
            heappush(batch, (worker.clock + steps, number, worker.now_s))

    def _compute(self, worker: _DecodeWorker, number: int) -> None:
        arrays, others = self._arrays, len(worker.batch)
        worker.now_s += arrays.fixed_s + self._prefill_s[number]
        if others:
            worker.now_s += self._decode_s(others, worker.kv_tokens)
            worker.clock += 1
            worker.kv_tokens += others

    def _note_ttft(self, worker: _DecodeWorker, number: int, waited_s: float, log: MissLog) -> None:
        arrays = self._arrays
        if self._is_aggregated:
            ttft_s = worker.now_s - arrays.arrival_s[number]
            if log.ttft_s is not None:
                log.ttft_s[number] = ttft_s
        else:
            ttft_s = waited_s + arrays.fixed_s + self._prefill_s[number] + arrays.rest_s[number]
        if ttft_s > self._limits.ttft_s:
            log.ttft.append(number)

    def _advance(
        self, worker: _DecodeWorker, until_s: float, log: MissLog, until_an_end: bool = False
    ) -> None:
        batch, prompt_tokens, all_steps = worker.batch, self._arrays.prompt_tokens, self._arrays.steps
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
                    log.itl.append(number)
                if log.itl_s is not None:
                    log.itl_s[number] = itl_s
            if until_an_end:
                until_s = now_s
        worker.now_s = max(now_s, until_s) if until_s < math.inf else now_s
        worker.clock, worker.kv_tokens = clock, max(0.0, kv_tokens)

    def _decode_s(self, count: int, kv_tokens: float) -> float:
        bucket = int(kv_tokens) >> KV_BUCKET_BITS
        key = count << 32 | bucket
        step_s = self._step_s.get(key)
        if step_s is None:
            middle = (bucket + 0.5) * (1 << KV_BUCKET_BITS)
            step_s = self._step_s[key] = max(self._timing.decode_ms(count, middle) / 1000, 1e-6)
        return step_s
