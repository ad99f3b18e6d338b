"""The turns of requests that bear keys: which may go to a worker now, and to which.

Without keys a request goes to a worker at once, and waits in its engine, first come first served: who sends
2,000 requests is before everybody else. With keys it waits here, in a ``FairQueue``, and an engine gets no
more than it can begin with:

1. no more requests than it computes at once, as its card says (``request_slots``), or its model's
   ``concurrency-limit``; a frontend has its part of them where several share the port;
2. no more prompts that wait for a first token than two, or as many as have ``UNBEGUN_TOKENS`` together. That
   keeps its steps filled, and is also the bound where it says no number of requests, or has memory for fewer
   than that. It is known of streams alone: an answer that comes whole has no first token.

A key that has nothing in hand is bound by the first alone. So what stands before its prompt in an engine is
at most what the second lets in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import Struct

from dynaplan.config.settings.frontend import part_of_limit
from dynaplan.routing.booking import WorkerBook
from dynaplan.routing.fair_queue import KEPT_PART, FairQueue, KeyTurns
from dynaplan.store.instances import Instance

UNBEGUN_TOKENS = 1024
UNBEGUN_PROMPTS = 2

LOOK_S, IDLE_LOOK_S = 1.0, 10.0
"""Seconds after which a request that waits looks by itself, in its turn and before."""

UNKNOWN_PLACES = 1_000_000
"""The places of a worker that says no number."""


@dataclass(slots=True)
class TurnsBook(WorkerBook):
    """What is in flight at one worker; ``unbegun`` are prompts of streams that have no first token yet."""

    unbegun_prompts: int = 0
    unbegun_tokens: int = 0


class Turns:
    """The turns at the workers of one model; ``frontends`` share the port."""

    def __init__(self, frontends: int) -> None:
        self._frontends = frontends
        self.queue = FairQueue[Turn]()
        self.now_s = asyncio.get_running_loop().time

    def workers_for(
        self, turn: Turn, usable: Sequence[Instance], books: Mapping[int, TurnsBook]
    ) -> list[Instance]:
        """Return those of the usable workers that may take this request now; none before its turn.

        A request that finds others waiting waits, too: perhaps it is the first of them.
        """
        queue = self.queue
        if queue.waiting:
            turn.join()
            if queue.first() is not turn:
                return []
        free_in_all = places_in_all = 0
        found = []
        for each in usable:
            slots, book = each.card.get("request_slots"), books[each.instance_id]
            if isinstance(slots, int) and slots > 0:
                places = part_of_limit(slots, self._frontends)
            else:
                places = UNKNOWN_PLACES
            free = places - book.in_flight
            places_in_all += places
            if free > 0:
                free_in_all += free
                is_short = book.unbegun_tokens + turn.prompt_tokens <= UNBEGUN_TOKENS
                if is_short or book.unbegun_prompts < UNBEGUN_PROMPTS or queue.is_newcomer(turn.name):
                    found.append(each)
        if free_in_all > places_in_all * KEPT_PART:  # more than are ever kept for others
            return found
        may_begin = queue.may_begin(turn.name, free_in_all, places_in_all, self.now_s())
        return found if may_begin else []

    def wake_next(self) -> None:
        """Let the request whose turn it is try again."""
        if turn := self.queue.first():
            turn.wake()

    def of_keys(self) -> list[KeyTurns]:
        """Return what each key has here, the one with most work lately first."""
        self.queue.forget(self.now_s())
        return list(self.queue.turns(self.now_s()))


class Turn(Struct, eq=False):
    """One request's turn, which is that of all its attempts: it waits where it must, and has a worker.

    Where nobody waits and there is a place it never joins the queue. Who books with it leaves it in the end.
    """

    name: str
    weight: float
    prompt_tokens: int
    is_stream: bool
    turns: Turns
    is_waiting: bool = False
    unbegun_at: TurnsBook | None = None
    """The book of its worker until its first token is there, of a stream."""
    counted_work: float = 0.0
    is_woken: bool = False
    woken: asyncio.Future[None] | None = None

    def join(self) -> None:
        """Wait behind the others of the same key, unless it does so."""
        if not self.is_waiting:
            self.is_waiting = True
            self.turns.queue.join(self.name, self.weight, self, self.turns.now_s())

    def leave(self) -> None:
        """Wait no longer, without a worker."""
        self.is_waiting = False
        self.turns.queue.leave(self.name, self)
        self.turns.wake_next()

    def is_first_of_key(self) -> bool:
        """Tell whether no request of the same key waits before it."""
        return self.turns.queue.first_of(self.name) is self

    async def wait(self, *, has_check: bool) -> None:
        """Wait until it may be its turn; a second at most where it is, or has something to check."""
        if not self.is_woken:  # since it looked last
            loop = asyncio.get_running_loop()
            is_awake = has_check or self.turns.queue.first() is self
            self.woken = loop.create_future()
            timer = loop.call_later(LOOK_S if is_awake else IDLE_LOOK_S, self.wake)
            try:
                await self.woken
            finally:
                timer.cancel()
        self.is_woken = False

    def wake(self) -> None:
        self.is_woken = True
        if self.woken and not self.woken.done():
            self.woken.set_result(None)

    def begin(self, book: TurnsBook) -> None:
        """Note that it has a worker, by its book."""
        turns, queue = self.turns, self.turns.queue
        self.is_waiting = False
        self.counted_work += queue.begin(self.name, self.weight, self, self.prompt_tokens, turns.now_s())
        if self.is_stream:
            self.unbegun_at = book
            book.unbegun_prompts += 1
            book.unbegun_tokens += self.prompt_tokens
        if queue.waiting:
            turns.wake_next()

    def begin_answer(self) -> None:
        """Note that its first token is there."""
        if book := self.unbegun_at:
            book.unbegun_prompts -= 1
            book.unbegun_tokens -= self.prompt_tokens
            self.unbegun_at = None
            if self.turns.queue.waiting:
                self.turns.wake_next()

    def end(self) -> None:
        """Note that it has its worker no longer."""
        if self.unbegun_at:
            self.begin_answer()
        queue = self.turns.queue
        queue.end(self.name, self.turns.now_s())
        if queue.waiting:
            self.turns.wake_next()

    def settle(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Count what was really computed for it."""
        if counted := self.counted_work:  # else it never had a worker
            self.turns.queue.correct(self.name, prompt_tokens, answer_tokens, counted)
