"""The router: follows discovery, counts the requests and KV blocks at each worker, and chooses among them.

``routing_logic`` has the routing modes, which are pure.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from dynaplan.config.settings.frontend import RoutingSettings
from dynaplan.contract.absence import Absence
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing.router_inputs import CachedPrefixes, RouterInputs
from dynaplan.gateway.kv_routing.tokenizing import prompt_blocks, token_fault
from dynaplan.gateway.openai_api import NO_BLOCKS, ApiError, Call, PromptBlocks, no_worker
from dynaplan.gateway.router_metrics import RouterMetrics
from dynaplan.gateway.routing.key_turns import Turn, Turns, TurnsBook
from dynaplan.gateway.routing.running_places import RunningPlaces
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers
from dynaplan.gateway.routing.stalled_workers import StalledWorkers
from dynaplan.http.routes import EVENTS
from dynaplan.routing.booking import BookEntry
from dynaplan.routing.routing_logic import make_routing_logic
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance

NO_EVENTS = "prediction: its engine tells of no blocks, or events are missing"
EVENTS_OFF = "prediction: kv-events is off"
"""Sources of a worker's cached prefixes without KV events; others name the fault of its tokens."""


@dataclass(slots=True)
class _Book(TurnsBook):
    """What this frontend has in flight at one worker, and until when the worker gets no request."""

    avoid_until_s: float = 0.0


@dataclass(kw_only=True, slots=True)
class Booking(BookEntry):
    """One request at one worker, counted there until ``close``."""

    instance: Instance
    blocks: PromptBlocks = NO_BLOCKS
    inputs: RouterInputs
    closed: Callable[[], None] | None = None
    """Called at the end, once."""
    turn: Turn | None = None

    def finish_prefill(self) -> None:
        if self._prefill_blocks:
            BookEntry.finish_prefill(self)  # super() fails here before Python 3.14 (CPython 90562)
            if self.inputs.replica_sync:
                self.inputs.replica_sync.notify()
        if self.turn and self.turn.unbegun_at:
            self.turn.begin_answer()

    def close(self) -> None:
        BookEntry.close(self)
        if self.inputs.replica_sync:
            self.inputs.replica_sync.notify()
        if self.closed:
            self.closed()
            self.closed = None
        if self.turn:
            self.turn.end()
            self.turn = None


@dataclass
class FleetStatus:
    """What the fleet plugin publishes of the workers: whether one is starting, and why none answers."""

    is_worker_starting: bool = False
    wakes_on_demand: bool = True
    """A request wakes a worker where all sleep; else the fleet plugin does, when there is room."""
    absence: Absence | None = None


class WorkerRouter:
    """Chooses among the ``instances`` of one component. ``metrics`` observes each choice by prefix.

    An instance gets no more than ``limit`` requests at a time, as many as come where that is 0: who finds all
    of them full waits, in the order of arrival. With ``turns`` requests that bear keys wait for theirs.
    ``places`` holds requests back in front of workers that run as many as a planner wants; this frontend is
    one of ``frontends``.
    """

    def __init__(
        self,
        discovery: Discovery,
        component: str,
        settings: RoutingSettings,
        inputs: RouterInputs,
        *,
        fleet: FleetStatus | None = None,
        sleeping: SleepingWorkers | None = None,
        stalled: StalledWorkers | None = None,
        metrics: RouterMetrics | None = None,
        limit: int = 0,
        turns: Turns | None = None,
        frontends: int = 1,
    ) -> None:
        self._discovery = discovery
        self._component = component
        self._settings = settings
        self._logic = make_routing_logic(
            settings.router, Random().random, settings.overlap_weight, settings.router_temperature
        )
        self._inputs = inputs
        self._prefixes = inputs.prefixes
        self._fleet = fleet or FleetStatus()
        self._metrics = metrics
        self._limit = limit
        self.turns = turns
        self.places = RunningPlaces(frontends, self._running)
        self._sleeping = sleeping
        self._stalled = stalled
        if sleeping:
            sleeping.on_change(lambda fell_asleep: self.wake_waiting())
        self._loop = asyncio.get_running_loop()
        self._books: dict[int, _Book] = {}
        self.instances: tuple[Instance, ...] = ()
        self.context_tokens = 0
        """The longest context of the workers whose tokens the frontend can count; 0 without any."""
        inputs.books = self._books
        self._had_instances = False
        # A frontend that has just started may have started on a store that was wiped: no worker is back yet.
        self._last_seen_s = self._loop.time()
        self._changed: asyncio.Future[None] | None = None
        """Is done at the next change, for requests that wait for one."""
        self._follow()
        discovery.on_change(self._follow)

    def no_worker_error(self, otherwise: str) -> ApiError:
        """Make an error 503 that says why no worker answers, and when one may; ``otherwise`` if not known."""
        absence = self._fleet.absence
        if absence is None:
            return no_worker(otherwise)
        now_s = time.time()
        return no_worker(absence.message(now_s), absence.retry_after_s(now_s))

    @property
    def in_flight(self) -> int:
        """The requests of this frontend that its workers answer now."""
        return sum(book.in_flight for book in self._books.values())

    def book_at_once(self, turn: Turn | None = None) -> Booking | None:
        """Book the request at a worker that can take it now; None without one. Not in the mode ``kv``.

        One with a ``turn`` that gets none waits from then on.
        """
        booking = self._book_now(NO_BLOCKS, turn, may_wait=turn is None)
        if turn and not booking:
            turn.join()
        return booking

    async def book(
        self,
        call: Call,
        deadline_s: float,
        check: Callable[[], Awaitable[None]] | None = None,
        turn: Turn | None = None,
    ) -> Booking:
        """Book the request at a worker; wait for one until the deadline (on the loop's clock).

        Waiting is worth it when a worker is starting, was there in the last ``WORKER_RETURN_S``, or is only
        avoided for a moment, unless the next start is known to be after the deadline. Where all sleep, one is
        woken. Raises ApiError (503) when none is expected, or none has appeared. ``check`` is awaited at
        least once a second meanwhile, and may end the wait. Who waits for his ``turn`` at workers that are
        there has no deadline.
        """
        blocks, may_wait = NO_BLOCKS, turn is None
        while True:
            if self._prefixes and not blocks.tokens and self.instances:
                blocks = await prompt_blocks(call, self.instances[0].card, self._inputs.tokenizers)
            booking = self._book_now(blocks, turn, may_wait=may_wait)
            if booking:
                return booking
            if turn:
                turn.join()
            if may_wait and await self.places.wait(deadline_s, self._next_chance_s, check):
                may_wait = False
                continue
            now_s = self._loop.time()  # before the check, which is to say first that the time is over
            if check:
                await check()
            self._wake_one(is_late=now_s >= deadline_s)
            if turn and self.instances:
                await turn.wait(has_check=bool(check))
                continue
            if now_s >= deadline_s or not self._is_expected(now_s, deadline_s):
                raise self.no_worker_error(f"No {self._component} is there to answer. Try again.")
            await self._wait_for_change(min(deadline_s, self._next_chance_s(now_s)) - now_s)

    def _wake_one(self, *, is_late: bool) -> None:
        """Have a worker woken when all sleep; raises ApiError (503) when that is in vain or too late."""
        sleeping, instances = self._sleeping, self.instances
        if not sleeping or not self._fleet.wakes_on_demand or not sleeping.all_asleep(instances):
            return
        reason = sleeping.wake_one(instances)
        if reason or is_late:
            why = f"cannot be woken. {reason}" if reason else "was not awake in time. Try again."
            raise no_worker(f"Every {self._component} is asleep, and {why}")

    def is_asleep(self, instance: Instance) -> bool:
        """Return whether the instance's engine sleeps, as far as is known here."""
        return self._sleeping is not None and instance in self._sleeping

    def cache_sources(self) -> dict[str, str]:
        """Return by worker the source of its cached prefixes; empty in modes that do not use them."""
        prefixes = self._prefixes
        if not prefixes:
            return {}
        if not self._settings.kv_events:
            return {each.worker: EVENTS_OFF for each in self.instances}
        return {each.worker: self._cache_source(each, prefixes) for each in self.instances}

    def _cache_source(self, instance: Instance, prefixes: CachedPrefixes) -> str:
        if fault := token_fault(instance.card, self._inputs.tokenizers):
            return f"prediction: {fault}"
        return EVENTS if prefixes.is_reported(instance.instance_id) else NO_EVENTS

    def stop_routing_to(self, instance_id: int) -> int:
        """Stop choosing this instance; return the number of this frontend's requests in flight there.

        The worker itself reports that it leaves, because discovery is late while the store is away.
        """
        for instance in self.instances:
            if instance.instance_id == instance_id:
                self._book_of(instance).avoid_until_s = math.inf
        return self.in_flight_at(instance_id)

    def in_flight_at(self, instance_id: int) -> int:
        """Return the number of this frontend's requests in flight at that instance."""
        book = self._books.get(instance_id)
        return book.in_flight if book else 0

    def avoid(self, instance: Instance) -> None:
        """Send nothing for ``AVOID_WORKER_S`` to an instance that refused a request or died over one."""
        self._book_of(instance).avoid_until_s = self._loop.time() + timing.AVOID_WORKER_S

    def _book_now(self, blocks: PromptBlocks, turn: Turn | None, *, may_wait: bool) -> Booking | None:
        """Book at a worker that can take the request now; None without one, or where it is held back."""
        now_s, books = self._loop.time(), self._books
        usable = self._usable(now_s)
        if not usable:
            return None
        if turn and self.turns and not (usable := self.turns.workers_for(turn, usable, books)):
            return None
        if limit := self.places.limit:
            below = [each for each in usable if books[each.instance_id].in_flight < limit.most]
            if may_wait and (self.places.waiting or not below) and self.places.would_hold_back():
                return None
            usable = below or usable
        if not self._prefixes:
            return self._enter(self._choose(usable, {}, 0), NO_BLOCKS, 0, turn)
        overlaps = self._prefixes.overlaps(blocks, self._books, now_s)
        chosen = self._choose(usable, overlaps, len(blocks.hashes))
        self._inputs.record_prompt(blocks, chosen.instance_id, now_s)
        overlap = overlaps.get(chosen.instance_id, 0)
        if self._metrics:
            most = max((overlaps.get(each.instance_id, 0) for each in usable), default=0)
            self._metrics.observe_choice(len(blocks.hashes), overlap, most)
        return self._enter(chosen, blocks, overlap, turn)

    def _usable(self, now_s: float) -> list[Instance]:
        """Return the instances that may get a request now, whatever the planner's limit."""
        instances, books, most = self.instances, self._books, self._limit or math.inf
        asleep = self._sleeping.ids if self._sleeping else ()
        usable = [
            each
            for each in instances
            if books[each.instance_id].avoid_until_s <= now_s
            and each.instance_id not in asleep
            and books[each.instance_id].in_flight < most
        ]
        if self._stalled and (stalled := self._stalled.ids):
            lively = [each for each in instances if each.instance_id not in stalled]
            if any(each.instance_id not in asleep for each in lively):  # be it full: it is waited for
                usable = [each for each in usable if each in lively]
        return usable

    def _running(self) -> list[int]:
        """Return the requests of this frontend at each instance that may get one now."""
        return [self._books[each.instance_id].in_flight for each in self._usable(self._loop.time())]

    def _choose(self, usable: Sequence[Instance], overlaps: dict[int, int], blocks: int) -> Instance:
        index = self._logic.choose_without_load(len(usable))
        if index is not None:
            return usable[index]
        books, others = self._books, self._inputs.others
        candidates = [
            books[identity].candidate(identity, overlaps.get(identity, 0), others.get(identity))
            for identity in [instance.instance_id for instance in usable]
        ]
        return usable[candidates.index(self._logic.choose(candidates, blocks))]

    def _enter(
        self, instance: Instance, blocks: PromptBlocks, overlap_blocks: int, turn: Turn | None
    ) -> Booking:
        if self._inputs.replica_sync:
            self._inputs.replica_sync.notify()
        booking = Booking(
            self._books[instance.instance_id],
            len(blocks.hashes),
            overlap_blocks,
            blocks.tokens,
            blocks.prompt_tokens % blocks.tokens if blocks.tokens else 0,
            instance=instance,
            blocks=blocks,
            inputs=self._inputs,
            closed=self.wake_waiting,
            turn=turn,
        )
        if turn:
            turn.begin(self._books[instance.instance_id])
        return booking

    def _book_of(self, instance: Instance) -> _Book:
        book = self._books.get(instance.instance_id)
        if book is None:
            book = self._books[instance.instance_id] = _Book()
        return book

    def _is_expected(self, now_s: float, deadline_s: float) -> bool:
        if self.instances:
            return True
        absence = self._fleet.absence
        if absence and absence.retry_s(time.time()) > deadline_s - now_s:
            return False
        return now_s - self._last_seen_s < timing.WORKER_RETURN_S or self._fleet.is_worker_starting

    def _next_chance_s(self, now_s: float) -> float:
        """Return the time at which an avoided worker may be tried again; in 1 s at the latest."""
        ends_s = (self._book_of(each).avoid_until_s for each in self.instances)
        return min((now_s + 1.0, *(end_s for end_s in ends_s if end_s > now_s)))

    async def _wait_for_change(self, timeout_s: float) -> None:
        if self._changed is None:
            self._changed = self._loop.create_future()
        await asyncio.wait((self._changed,), timeout=max(timeout_s, 0.001))

    def _follow(self) -> None:
        """Take over a change of the instances: wake the waiting requests, drop the books of gone instances.

        A book with requests in flight stays, because its worker, which drains, asks for their number.
        """
        self.instances = self._discovery.instances(self._component)
        for each in self.instances:
            self._book_of(each)
        self.context_tokens = _context_tokens(each.card for each in self.instances)
        if self.instances or self._had_instances:
            self._last_seen_s = self._loop.time()
        self._had_instances = bool(self.instances)
        known = {instance.instance_id for instance in self.instances}
        if self._prefixes:
            for gone in self._books.keys() - known:
                self._prefixes.remove_worker(gone)
        for identity, book in list(self._books.items()):
            if identity not in known and not book.in_flight:
                del self._books[identity]
        self.wake_waiting()

    def wake_waiting(self) -> None:
        """Let every waiting request try again."""
        if self._changed:
            self._changed.set_result(None)
            self._changed = None
        if self.turns and self.turns.queue.waiting:
            self.turns.wake_next()
        if self.places.waiting:
            self.places.wake()


def _context_tokens(cards: Iterable[Mapping[str, Any]]) -> int:
    """Return the longest context, in tokens, of the workers whose tokenizer the frontend has; else 0.

    Only the simulated engine's tokenizer is known here. Other engines check the length themselves.
    """
    longest = 0
    for card in cards:
        if card.get("tokenizer") == "sim" and isinstance(tokens := card.get("context_tokens"), int):
            longest = max(longest, tokens)
    return longest
