"""The mechanics of a box of several models in virtual time; what is loaded when is a policy's.

A model has a worker or none, and further ones where the policy starts them; a request goes to the one that
has the fewest. A load takes the model's ``load_s``; a worker that has drained gives its memory
back ``FREE_S`` later, and waking takes its level's time. A worker answers ``slots`` requests at once, the
others queue in it; an answer takes ``prompt_tokens / prefill_tokens_per_s + output_tokens x itl_s``, whatever
else it answers. That is coarser than the simulation of one model (``simulation.simulated_service``): waits
for models are tens of seconds, and what batches do to a token is milliseconds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Protocol

from dynaplan.models.model import (
    NO_CONSTRAINTS,
    Constraints,
    Device,
    ModelPolicies,
    ModelPolicy,
    ModelsObservation,
    ModelState,
    ModelStatus,
)
from dynaplan.models.rules.memory import level_of
from dynaplan.models.rules.replicas import as_replica, replica_name, wanted_workers
from dynaplan.simulation.many_models.call_chains import Chain, ChainCall

FREE_S = 0.5
"""How long the driver takes to show the memory of a worker that has gone."""

MAX_TAIL_S = 7200.0
"""For how long after the last arrival requests are waited for; what is unanswered then is lost."""


@dataclass(frozen=True)
class SimulatedModel:
    """A model's settings, how long it really takes to load, and how it answers."""

    settings: ModelPolicy
    load_s: float
    prefill_tokens_per_s: float = 2000.0
    itl_s: float = 0.02
    slots: int = 8

    def ttft_s(self, call: ChainCall) -> float:
        """Return the TTFT of a call that finds the model ready and a slot free."""
        return call.prompt_tokens / self.prefill_tokens_per_s

    def answer_s(self, call: ChainCall) -> float:
        return self.ttft_s(call) + call.output_tokens * self.itl_s


@dataclass
class SimulatedCall:
    """One call on its way. ``admitted_s`` is when a worker took it, ``begun_s`` when a slot did."""

    number: int
    call: ChainCall
    arrival_s: float
    on_end: Callable[[], None]
    admitted_s: float = inf
    begun_s: float = inf
    end_s: float = inf
    was_ready: bool = False
    refused: int = 0
    is_cut: bool = False


@dataclass
class SimulatedModelWorker:
    """A worker of a model, with its requests; ``generation`` makes events of an earlier load void."""

    model: SimulatedModel
    status: ModelStatus
    waiting: deque[SimulatedCall] = field(default_factory=deque)
    queued: deque[SimulatedCall] = field(default_factory=deque)
    running: dict[int, SimulatedCall] = field(default_factory=dict)
    generation: int = 0

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.queued)


class BoxPolicy(Protocol):
    """Decides which requests are admitted, and which models are loaded, put to sleep and unloaded."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        ...

    def act(self, box: Box) -> float:
        """Admit and refuse requests, load and put away models, as the policy has it now.

        Returns when it is to be called again at the latest.
        """
        ...


class Box:
    """The models of a box under a policy, in virtual time.

    Only the deployment's own rules heed ``constraints``.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        models: Mapping[str, SimulatedModel],
        policy: BoxPolicy,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        self.devices, self.now_s = devices, 0.0
        self.workers = {
            name: SimulatedModelWorker(model, ModelStatus(name)) for name, model in models.items()
        }
        self.further = {
            (name, number): SimulatedModelWorker(model, ModelStatus(replica_name(name, number)))
            for name, model in models.items()
            for number in range(2, model.settings.max_workers + 1)
        }
        self.settings = ModelPolicies({name: model.settings for name, model in models.items()}, constraints)
        self.requests: list[SimulatedCall] = []
        self.loads = 0
        self.byte_seconds = 0.0
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake_s = inf
        self._open = self._thinking = 0
        self._is_counting = True

    # the course of time

    def run(self, chains: Iterable[Chain], duration_s: float) -> None:
        """Run all chains, in the order of their begin, and answer the requests that are left.

        Memory that is held counts for ``duration_s``.
        """
        self._act()
        for chain in chains:
            self._pass_until(chain.begin_s)
            self._ask_next(iter(chain.calls), chain.end_s)
            self._act()
        self._pass_until(duration_s)
        self._is_counting = False
        end_s = self.now_s + MAX_TAIL_S
        while (self._open or self._thinking) and self._next_s() <= end_s:
            self._step()

    def _pass_until(self, at_s: float) -> None:
        while self._next_s() <= at_s:
            self._step()
        self._advance(max(at_s, self.now_s))

    def _step(self) -> None:
        """Let the next thing happen, and the policy act on it."""
        self._advance(self._next_s())
        if self._events and self._events[0][0] <= self.now_s:
            heappop(self._events)[2]()
        self._act()

    def _next_s(self) -> float:
        return min(self._events[0][0] if self._events else inf, self._wake_s)

    def _advance(self, at_s: float) -> None:
        if self._is_counting:
            workers = [*self.workers.values(), *self.further.values()]
            held = sum(sum(each.status.held_bytes.values()) for each in workers)
            self.byte_seconds += held * (at_s - self.now_s)
        self.now_s = at_s

    def _act(self) -> None:
        self._wake_s = self._policy.act(self)

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        heappush(self._events, (self.now_s + after_s, next(self._order), what))

    def _ask_next(self, calls: Iterable[ChainCall], end_s: float) -> None:
        """Have a chain's next call arrive, after its client's pause, unless the chain is over by then."""
        call = next(iter(calls), None)
        if call is None:
            return
        self._thinking += 1

        def ask() -> None:
            self._thinking -= 1
            if self.now_s < end_s:
                self._arrive(call, lambda: self._ask_next(calls, end_s))

        if call.think_s:
            self._later(call.think_s, ask)
        else:
            ask()

    def _arrive(self, call: ChainCall, on_end: Callable[[], None]) -> None:
        worker = self.workers[call.model]
        request = SimulatedCall(len(self.requests), call, self.now_s, on_end)
        request.was_ready = worker.status.state is ModelState.READY
        self._open += 1
        self.requests.append(request)
        worker.waiting.append(request)

    # what a policy sees

    def observation(self) -> ModelsObservation:
        models = [self._seen(name) for name in self.workers]
        return ModelsObservation((*models, *self._seen_further(models)), self.devices)

    def _seen(self, name: str) -> ModelStatus:
        worker = self.workers[name]
        oldest = worker.waiting[0].arrival_s if worker.waiting else inf
        return replace(
            worker.status,
            waiting=len(worker.waiting),
            oldest_arrival_s=oldest,
            in_flight=sum(each.in_flight for each in self._of(name)),
        )

    def _seen_further(self, models: Iterable[ModelStatus]) -> Iterator[ModelStatus]:
        for model in models:
            wanted = wanted_workers(self.settings.models[model.name], model.in_flight + model.waiting)
            for (name, number), worker in self.further.items():
                if name == model.name and worker.status.is_loaded:
                    if number <= wanted:
                        worker.status = replace(worker.status, last_use_s=self.now_s)
                    yield as_replica(worker.status, replica_name(name, number), model, number <= wanted)

    def _of(self, name: str) -> list[SimulatedModelWorker]:
        return [self.workers[name], *(each for (model, _), each in self.further.items() if model == name)]

    def _find(self, name: str) -> SimulatedModelWorker:
        """Return the worker that a plan names."""
        if name in self.workers:
            return self.workers[name]
        return next(each for key, each in self.further.items() if replica_name(*key) == name)

    def promote(self) -> None:
        """Swap a further worker that is ready with the first one of its model, where that is not."""
        for (name, number), worker in self.further.items():
            first = self.workers[name]
            if first.status.state is not ModelState.READY and worker.status.state is ModelState.READY:
                worker.waiting, first.waiting = first.waiting, worker.waiting
                worker.status = replace(worker.status, name=name)
                self.workers[name], self.further[name, number] = worker, first

    # what a policy does

    def admit(self, name: str, most: int | None = None) -> None:
        """Give ``most`` waiting requests (None: all) to a ready model's workers, the oldest first."""
        worker = self.workers[name]
        while worker.waiting and (most is None or most > 0):
            request = worker.waiting.popleft()
            request.admitted_s = self.now_s
            ready = [each for each in self._of(name) if each.status.state is ModelState.READY]
            least = min(ready, key=lambda each: each.in_flight)
            least.queued.append(request)
            self._fill(least)
            most = None if most is None else most - 1

    def load(self, name: str, devices: tuple[int, ...]) -> None:
        worker = self._find(name)
        self.loads += name in self.workers
        held = dict.fromkeys(devices, worker.model.settings.claim_bytes)
        self._move(worker, ModelState.LOADING, placed_on=devices, held_bytes=held, load_asked_s=None)
        self._become_ready(worker, worker.model.load_s)

    def wake(self, name: str) -> None:
        worker = self.workers[name]
        level = level_of(worker.model.settings, worker.status.sleep_level)
        held = dict.fromkeys(worker.status.placed_on, worker.model.settings.claim_bytes)
        self._move(worker, ModelState.LOADING, held_bytes=held)
        self._become_ready(worker, level.wake_s if level else worker.model.load_s)

    def _become_ready(self, worker: SimulatedModelWorker, after_s: float) -> None:
        generation = worker.generation

        def ready() -> None:
            if worker.generation == generation:
                self._move(worker, ModelState.READY, sleep_level="")

        self._later(after_s, ready)

    def drain(self, name: str, level: str = "") -> None:
        """Let the worker finish what it answers, then sleep at that level or be unloaded.

        A load ends at once.
        """
        worker = self._find(name)
        worker.generation += 1
        self._move(worker, ModelState.DRAINING, sleep_level=level)
        self._leave_when_empty(worker)

    def kill(self, name: str) -> None:
        """End the worker at once: what it answers is cut."""
        worker = self.workers[name]
        cut = [*worker.running.values(), *worker.queued]
        worker.running.clear()
        worker.queued.clear()
        for request in cut:
            request.is_cut = True
            self._end(request)
        self.drain(name)

    def refuse(self, name: str, status: int, until_s: float) -> None:
        """Refuse the requests that wait for the model and came by ``until_s``, with that HTTP ``status``."""
        worker = self.workers[name]
        while worker.waiting and worker.waiting[0].arrival_s <= until_s:
            request = worker.waiting.popleft()
            request.refused = status
            self._end(request)

    # workers

    def _move(self, worker: SimulatedModelWorker, state: ModelState, **changes: object) -> None:
        moved = worker.status.moved(state, self.now_s)
        worker.status = replace(moved, history=(), **changes)  # type: ignore[arg-type]

    def _fill(self, worker: SimulatedModelWorker) -> None:
        while worker.queued and len(worker.running) < worker.model.slots:
            request = worker.queued.popleft()
            request.begun_s = self.now_s
            worker.running[request.number] = request
            self._later(worker.model.answer_s(request.call), partial(self._answered, worker, request))
        worker.status = replace(worker.status, last_use_s=self.now_s)

    def _answered(self, worker: SimulatedModelWorker, request: SimulatedCall) -> None:
        if worker.running.pop(request.number, None) is None:
            return
        self._end(request)
        self._fill(worker)
        self._leave_when_empty(worker)

    def _end(self, request: SimulatedCall) -> None:
        self._open -= 1
        request.end_s = self.now_s
        request.on_end()

    def _leave_when_empty(self, worker: SimulatedModelWorker) -> None:
        if worker.status.state is not ModelState.DRAINING or worker.in_flight:
            return
        level = level_of(worker.model.settings, worker.status.sleep_level)

        def gone() -> None:
            if level:
                kept = dict.fromkeys(worker.status.placed_on, level.kept_bytes)
                self._move(worker, ModelState.ASLEEP, held_bytes=kept)
            else:
                self._move(worker, ModelState.UNLOADED, held_bytes={}, placed_on=())

        self._later(FREE_S, gone)
