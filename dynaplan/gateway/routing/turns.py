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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

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


class Turns:
    """The turns at the workers of one model; ``frontends`` share the port."""

    def __init__(self, frontends: int) -> None:
        self._frontends = frontends
        self._queue = FairQueue[Turn]()
        self.now_s = asyncio.get_running_loop().time
        self._unbegun: dict[int, Counter[str]] = {}

    @contextmanager
    def turn(self, use: KeyUse, call: Call) -> Iterator[Turn]:
        """Let a request wait; yields its turn, which is that of all its attempts."""
        turn = use.turn
        if turn is None:
            turn = use.turn = Turn(self, self._queue, use.holder.name, call.prompt_tokens, call.is_stream)
        turn.join(use.holder.weight)
        try:
            yield turn
        finally:
            turn.leave()

    def open_to(
        self, turn: Turn, usable: Sequence[Instance], books: Mapping[int, WorkerBook]
    ) -> list[Instance]:
        """Return those of the usable workers that may take this request now; none before its turn."""
        if self._queue.first() is not turn:
            return []
        places = {each.instance_id: self._places(each) for each in usable}
        free = {identity: most - books[identity].in_flight for identity, most in places.items()}
        in_all = sum(each for each in free.values() if each > 0)
        if not self._queue.may_begin(turn.name, in_all, sum(places.values()), self.now_s()):
            return []
        is_newcomer = self._queue.is_newcomer(turn.name)
        return [
            each
            for each in usable
            if free[each.instance_id] > 0 and (is_newcomer or self._has_room(each.instance_id, turn))
        ]

    def wake_next(self) -> None:
        """Let the request whose turn it is try again."""
        if turn := self._queue.first():
            turn.wake()

    def of_keys(self) -> list[KeyTurns]:
        """Return what each key has here, the largest share first."""
        self._queue.forget(self.now_s())
        return list(self._queue.turns(self.now_s()))

    def add_unbegun(self, instance_id: int, prompts: int, tokens: int) -> None:
        """Count prompts at a worker whose streams have no first token yet."""
        found = self._unbegun.setdefault(instance_id, Counter())
        found["prompts"] += prompts
        found["tokens"] += tokens
        if not found["prompts"]:
            del self._unbegun[instance_id]

    def _has_room(self, instance_id: int, turn: Turn) -> bool:
        found = self._unbegun.get(instance_id)
        if found is None or found["prompts"] < UNBEGUN_PROMPTS:
            return True
        return found["tokens"] + turn.prompt_tokens <= UNBEGUN_TOKENS

    def _places(self, instance: Instance) -> int:
        slots = instance.card.get("request_slots")
        if not isinstance(slots, int) or slots < 1:
            return UNKNOWN_PLACES
        return max(1, slots // self._frontends)


class Turn:
    """One request's turn: it waits, has a worker, and waits again when that worker died."""

    def __init__(
        self, turns: Turns, queue: FairQueue[Turn], name: str, prompt_tokens: int, is_stream: bool
    ) -> None:
        self.name = name
        self.prompt_tokens = prompt_tokens
        self._turns = turns
        self._queue = queue
        self._is_stream = is_stream
        self._is_waiting = False
        self._counted = 0.0
        self._unbegun_at: int | None = None
        self._woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def join(self, weight: float) -> None:
        """Wait behind the others of the same key."""
        self._queue.join(self.name, weight, self, self._turns.now_s())
        self._is_waiting = True

    def leave(self) -> None:
        """Wait no longer, if it does."""
        if self._is_waiting:
            self._is_waiting = False
            self._queue.leave(self.name, self)
            self._turns.wake_next()

    def open_among(self, usable: Sequence[Instance], books: Mapping[int, WorkerBook]) -> list[Instance]:
        """Return those of the usable workers that may take it now; none before its turn."""
        return self._turns.open_to(self, usable, books)

    def is_first_of_key(self) -> bool:
        """Tell whether no request of the same key waits before it."""
        return self._queue.first_of(self.name) is self

    async def wait(self, *, has_check: bool) -> None:
        """Wait until it may be its turn; a second at most where it is, or has something to check."""
        is_awake = has_check or self._queue.first() is self
        await asyncio.wait((self._woken,), timeout=LOOK_S if is_awake else IDLE_LOOK_S)
        if self._woken.done():
            self._woken = asyncio.get_running_loop().create_future()

    def wake(self) -> None:
        if not self._woken.done():
            self._woken.set_result(None)

    def begin(self, instance: Instance) -> None:
        """Note that it has a worker."""
        self._is_waiting = False
        self._counted += self._queue.begin(self.name, self, self.prompt_tokens, self._turns.now_s())
        if self._is_stream:
            self._unbegun_at = instance.instance_id
            self._turns.add_unbegun(instance.instance_id, 1, self.prompt_tokens)
        self._turns.wake_next()

    def begin_answer(self) -> None:
        """Note that its first token is there."""
        if self._unbegun_at is not None:
            self._turns.add_unbegun(self._unbegun_at, -1, -self.prompt_tokens)
            self._unbegun_at = None
            self._turns.wake_next()

    def end(self) -> None:
        """Note that it has its worker no longer."""
        self.begin_answer()
        self._queue.end(self.name, self._turns.now_s())
        self._turns.wake_next()

    def settle(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Count what was really computed for it."""
        if not self._counted:
            return  # it never had a worker
        self._queue.correct(self.name, prompt_tokens, answer_tokens, self._counted, self._turns.now_s())
