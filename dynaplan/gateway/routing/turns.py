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
from typing import TYPE_CHECKING

from dynaplan.config.settings.frontend import part_of_limit
from dynaplan.routing.booking import WorkerBook
from dynaplan.routing.fair_queue import FairQueue, KeyTurns
from dynaplan.store.instances import Instance

if TYPE_CHECKING:
    from dynaplan.gateway.keys.keyring import KeyUse
    from dynaplan.gateway.openai_api import Call

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
        self._queue = FairQueue[Turn]()
        self.now_s = asyncio.get_running_loop().time

    def turn(self, use: KeyUse, call: Call) -> Turn:
        """Return a request's turn, which is that of all its attempts; it waits within a ``with``."""
        if use.turn is None:
            use.turn = Turn(self, self._queue, use, call)
        return use.turn

    def open_to(
        self, turn: Turn, usable: Sequence[Instance], books: Mapping[int, TurnsBook]
    ) -> list[Instance]:
        """Return those of the usable workers that may take this request now; none before its turn."""
        if self._queue.first() is not turn:
            return []
        free_in_all = places_in_all = 0
        found, is_newcomer = [], self._queue.is_newcomer(turn.name)
        for each in usable:
            places, book = self._places(each), books[each.instance_id]
            free = places - book.in_flight
            places_in_all += places
            if free > 0:
                free_in_all += free
                is_short = book.unbegun_tokens + turn.prompt_tokens <= UNBEGUN_TOKENS
                if is_newcomer or is_short or book.unbegun_prompts < UNBEGUN_PROMPTS:
                    found.append(each)
        may_begin = self._queue.may_begin(turn.name, free_in_all, places_in_all, self.now_s())
        return found if may_begin else []

    def wake_next(self) -> None:
        """Let the request whose turn it is try again."""
        if self._queue.waiting and (turn := self._queue.first()):
            turn.wake()

    def of_keys(self) -> list[KeyTurns]:
        """Return what each key has here, the one with most work lately first."""
        self._queue.forget(self.now_s())
        return list(self._queue.turns(self.now_s()))

    def _places(self, instance: Instance) -> int:
        slots = instance.card.get("request_slots")
        if not isinstance(slots, int) or slots < 1:
            return UNKNOWN_PLACES
        return part_of_limit(slots, self._frontends)


class Turn:
    """One request's turn: it waits, has a worker, and waits again when that worker died."""

    def __init__(self, turns: Turns, queue: FairQueue[Turn], use: KeyUse, call: Call) -> None:
        self.name = use.holder.name
        self.prompt_tokens = call.prompt_tokens
        self._weight = use.holder.weight
        self._turns = turns
        self._queue = queue
        self._is_stream = call.is_stream
        self._is_waiting = False
        self._counted = 0.0
        self._unbegun_at: TurnsBook | None = None
        self._is_woken = False
        self._woken: asyncio.Future[None] | None = None

    def __enter__(self) -> Turn:
        """Wait behind the others of the same key."""
        self._queue.join(self.name, self._weight, self, self._turns.now_s())
        self._is_waiting = True
        return self

    def __exit__(self, *_: object) -> None:
        """Wait no longer, if it does."""
        if self._is_waiting:
            self._is_waiting = False
            self._queue.leave(self.name, self)
            self._turns.wake_next()

    def is_first_of_key(self) -> bool:
        """Tell whether no request of the same key waits before it."""
        return self._queue.first_of(self.name) is self

    async def wait(self, *, has_check: bool) -> None:
        """Wait until it may be its turn; a second at most where it is, or has something to check."""
        if not self._is_woken:  # since it looked last
            loop = asyncio.get_running_loop()
            is_awake = has_check or self._queue.first() is self
            self._woken = loop.create_future()
            timer = loop.call_later(LOOK_S if is_awake else IDLE_LOOK_S, self.wake)
            try:
                await self._woken
            finally:
                timer.cancel()
        self._is_woken = False

    def wake(self) -> None:
        self._is_woken = True
        if self._woken and not self._woken.done():
            self._woken.set_result(None)

    def begin(self, book: TurnsBook) -> None:
        """Note that it has a worker, by its book."""
        self._is_waiting = False
        self._counted += self._queue.begin(self.name, self, self.prompt_tokens, self._turns.now_s())
        if self._is_stream:
            self._unbegun_at = book
            book.unbegun_prompts += 1
            book.unbegun_tokens += self.prompt_tokens
        self._turns.wake_next()

    def begin_answer(self) -> None:
        """Note that its first token is there."""
        if book := self._unbegun_at:
            book.unbegun_prompts -= 1
            book.unbegun_tokens -= self.prompt_tokens
            self._unbegun_at = None
            self._turns.wake_next()

    def end(self) -> None:
        """Note that it has its worker no longer."""
        if self._unbegun_at:
            self.begin_answer()
        self._queue.end(self.name, self._turns.now_s())
        self._turns.wake_next()

    def settle(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Count what was really computed for it."""
        if not self._counted:
            return  # it never had a worker
        self._queue.correct(self.name, prompt_tokens, answer_tokens, self._counted, self._turns.now_s())
