"""The router: follows discovery, counts the requests and KV blocks at each worker, and chooses among them.

The choice itself is pure and lies in ``gateway/routing/choosing.py`` (round robin, random, least loaded, or
by cached prefixes).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from types import MappingProxyType

from dynaplan.config.settings.routing import RoutingSettings
from dynaplan.fleet.rules.absence import Absence
from dynaplan.gateway.kv_routing.cached_prefixes import BY_PREFIX, CachedPrefixes
from dynaplan.gateway.kv_routing.prompt_tokens import Tokenizers, prompt_blocks, token_fault
from dynaplan.gateway.openai_api import NO_BLOCKS, ApiError, Call, PromptBlocks, no_worker
from dynaplan.gateway.routing.booking import BookEntry, WorkerBook
from dynaplan.gateway.routing.choosing import MODES, Inputs
from dynaplan.gateway.routing.sleeping_workers import Sleepers
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.http_routes import EVENTS

AVOID_S = 0.25
"""Time for which a worker that refused or died gets no request; after that it is tried again."""

REMEMBER_S = 60.0
"""Time, in seconds, after the last worker has gone, or the frontend has begun, in which requests still wait
for one to come."""

NO_EVENTS = "prediction: its engine tells of no blocks, or events are missing"
EVENTS_OFF = "prediction: kv-events is off"
"""Sources of what is known of a cache whose engine is not heard; others name the fault of its tokens."""


NO_OTHERS: Mapping[int, WorkerBook] = MappingProxyType({})


@dataclass(slots=True)
class _Book(WorkerBook):
    """One worker's book of this frontend, and until when it gets no request."""

    avoid_until_s: float = 0.0


@dataclass(kw_only=True)
class Booking(BookEntry):
    """One request at one worker, counted there until ``close``."""

    instance: Instance
    blocks: PromptBlocks = NO_BLOCKS
    changed: Callable[[], None]

    def prefilled(self) -> None:
        """Note that the prompt is computed."""
        super().prefilled()
        self.changed()


class WorkerRouter:
    """Chooses among the instances of one component.

    In the mode ``kv`` it asks ``prefixes`` for what the workers have cached, and cuts prompts with
    ``tokenizers``. ``is_coming`` tells whether workers are being started, ``absence`` why none answers, if
    their crashes are why. ``chosen`` is told of each choice by prefix: the numbers of the prompt's blocks,
    of the ones that the worker has cached, and the most that any has. ``others`` are the books of the other
    frontends, added up by instance id, and ``changed`` is called when a book of this one has changed.
    """

    def __init__(
        self,
        discovery: Discovery,
        component: str,
        settings: RoutingSettings,
        *,
        prefixes: CachedPrefixes | None = None,
        tokenizers: Tokenizers | None = None,
        is_coming: Callable[[], bool] = lambda: False,
        sleepers: Sleepers | None = None,
        absence: Callable[[], Absence | None] = lambda: None,
        chosen: Callable[[int, int, int], None] = lambda blocks, overlap, most: None,
        others: Mapping[int, WorkerBook] = NO_OTHERS,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._discovery = discovery
        self._component = component
        self._settings = settings
        self._choose = MODES[settings.router]
        self._prefixes = (prefixes or CachedPrefixes(settings)) if settings.router == BY_PREFIX else None
        self._tokenizers = tokenizers
        self._tell_chosen = chosen
        self._others = others
        self._tell_changed = changed
        self._is_coming = is_coming
        self._sleepers = sleepers
        if sleepers:
            sleepers.on_change(lambda fell_asleep: self._wake_waiting())
        self._absence = absence
        self._loop = asyncio.get_running_loop()
        self._books: dict[int, _Book] = {}
        self._dice = Random()
        self._turn = 0
        self._had_instances = False
        # A frontend that has just begun may have begun on a store that was wiped: nobody is back yet.
        self._last_seen_s = self._loop.time()
        self._changed = self._loop.create_future()
        self._follow()
        discovery.on_change(self._follow)

    @property
    def books(self) -> Mapping[int, WorkerBook]:
        """The books of this frontend, by instance id."""
        return self._books

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The instances that can be chosen."""
        return self._discovery.instances(self._component)

    def nobody(self, otherwise: str) -> ApiError:
        """Make an error 503 that says why no worker answers, and when one may; ``otherwise`` if not known."""
        absence = self._absence()
        if absence is None:
            return no_worker(otherwise)
        now_s = time.time()
        return no_worker(absence.message(now_s), absence.retry_after_s(now_s))

    async def book(self, call: Call, deadline_s: float) -> Booking:
        """Book the request at a worker; wait for one until the deadline (on the loop's clock).

        Waiting is worth it when a worker is starting, was there in the last ``REMEMBER_S``, or is avoided
        only for a moment, unless the next start is known to begin after the deadline. Where all sleep, one is
        woken. Raises ApiError (503) when none is expected, or none has come.
        """
        blocks = NO_BLOCKS
        while True:
            if self._prefixes and not blocks.tokens and self.instances:
                blocks = await prompt_blocks(call, self.instances[0].card, self._tokenizers)
            booking = self._book_now(blocks)
            if booking:
                return booking
            now_s = self._loop.time()
            self._wake_a_sleeper(is_late=now_s >= deadline_s)
            if now_s >= deadline_s or not self._is_expected(now_s, deadline_s):
                raise self.nobody(f"No {self._component} is there to answer. Try again.")
            await self._wait_for_change(min(deadline_s, self._next_chance_s(now_s)) - now_s)

    def _wake_a_sleeper(self, *, is_late: bool) -> None:
        """Have a worker woken when all sleep; raises ApiError (503) when that is in vain or too late."""
        sleepers, instances = self._sleepers, self.instances
        if not sleepers or not sleepers.are_all(instances):
            return
        reason = sleepers.wake_one(instances)
        if reason or is_late:
            why = f"cannot be woken. {reason}" if reason else "was not awake in time. Try again."
            raise no_worker(f"Every {self._component} is asleep, and {why}")

    def is_asleep(self, instance: Instance) -> bool:
        """Tell whether the instance's engine sleeps, as far as is known here."""
        return self._sleepers is not None and instance in self._sleepers

    def knowledge(self) -> dict[str, str]:
        """Return by worker how it is known what it has cached; empty in the modes that do not ask."""
        prefixes = self._prefixes
        if not prefixes:
            return {}
        if not self._settings.kv_events:
            return {each.worker: EVENTS_OFF for each in self.instances}
        told = {each.worker: prefixes.is_told(each.instance_id) for each in self.instances}
        faults = {each.worker: token_fault(each.card, self._tokenizers) for each in self.instances}
        return {
            worker: f"prediction: {faults[worker]}" if faults[worker] else EVENTS if is_told else NO_EVENTS
            for worker, is_told in told.items()
        }

    def leaving(self, instance_id: int) -> int:
        """Choose this instance no more; return the number of this frontend's requests in flight there.

        The worker says that it leaves itself, because discovery tells of it late while the store is away.
        """
        for instance in self.instances:
            if instance.instance_id == instance_id:
                self._book_of(instance).avoid_until_s = math.inf
        book = self._books.get(instance_id)
        return book.in_flight if book else 0

    def avoid(self, instance: Instance) -> None:
        """Send nothing for ``AVOID_S`` to an instance that refused a request or died over one."""
        self._book_of(instance).avoid_until_s = self._loop.time() + AVOID_S

    def _book_now(self, blocks: PromptBlocks) -> Booking | None:
        instances = self.instances
        if not instances:
            return None
        now_s = self._loop.time()
        asleep = self._sleepers or ()
        usable = [
            instance
            for instance in instances
            if self._book_of(instance).avoid_until_s <= now_s and instance not in asleep
        ]
        if not usable:
            return None
        if not self._prefixes:
            return self._entered(self._chosen(usable, {}, 0), NO_BLOCKS, 0)
        overlaps = self._prefixes.overlaps(blocks, self._books, now_s)
        chosen = self._chosen(usable, overlaps, len(blocks.hashes))
        self._prefixes.sent(blocks, chosen.instance_id, now_s)
        overlap = overlaps.get(chosen.instance_id, 0)
        most = max((overlaps.get(each.instance_id, 0) for each in usable), default=0)
        self._tell_chosen(len(blocks.hashes), overlap, most)
        return self._entered(chosen, blocks, overlap)

    def _chosen(self, usable: Sequence[Instance], overlaps: dict[int, int], blocks: int) -> Instance:
        books, settings = self._books, self._settings
        others = self._others
        candidates = [
            books[identity].candidate(identity, overlaps.get(identity, 0), others.get(identity))
            for identity in [instance.instance_id for instance in usable]
        ]
        inputs = Inputs(
            self._turn, self._dice.random(), blocks, settings.overlap_weight, settings.router_temperature
        )
        self._turn += 1
        chosen = self._choose(candidates, inputs)
        return next(instance for instance in usable if instance.instance_id == chosen.instance_id)

    def _entered(self, instance: Instance, blocks: PromptBlocks, overlap_blocks: int) -> Booking:
        self._tell_changed()
        return Booking(
            self._books[instance.instance_id],
            len(blocks.hashes),
            overlap_blocks,
            blocks.tokens,
            blocks.prompt_tokens % blocks.tokens if blocks.tokens else 0,
            instance=instance,
            blocks=blocks,
            changed=self._tell_changed,
        )

    def _book_of(self, instance: Instance) -> _Book:
        book = self._books.get(instance.instance_id)
        if book is None:
            book = self._books[instance.instance_id] = _Book()
        return book

    def _is_expected(self, now_s: float, deadline_s: float) -> bool:
        if self.instances:
            return True
        absence = self._absence()
        if absence and absence.retry_s(time.time()) > deadline_s - now_s:
            return False
        return now_s - self._last_seen_s < REMEMBER_S or self._is_coming()

    def _next_chance_s(self, now_s: float) -> float:
        """Return the time at which an avoided worker may be tried again; in 1 s when there is no worker."""
        asleep = self._sleepers or ()
        chances_s = (
            now_s + 1.0 if instance in asleep else self._book_of(instance).avoid_until_s
            for instance in self.instances
        )
        return min(chances_s, default=now_s + 1.0)

    async def _wait_for_change(self, timeout_s: float) -> None:
        await asyncio.wait((self._changed,), timeout=max(timeout_s, 0.001))

    def _follow(self) -> None:
        """Take over a change of the instances: wake the waiting requests, drop the books of gone instances.

        A book with requests in flight stays, because its worker, which drains, asks for their number.
        """
        if self.instances or self._had_instances:
            self._last_seen_s = self._loop.time()
        self._had_instances = bool(self.instances)
        known = {instance.instance_id for instance in self.instances}
        if self._prefixes:
            for gone in self._books.keys() - known:
                self._prefixes.left(gone)
        self._books = {
            identity: book for identity, book in self._books.items() if identity in known or book.in_flight
        }
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Let every waiting request look again."""
        self._changed.set_result(None)
        self._changed = self._loop.create_future()
