"""Events that have arrived for one subscription and were not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from dynaplan.events.sequences import Sequences
from dynaplan.events.subjects import Event
from dynaplan.util.errors import PermanentError

MOST_ARRIVED = 16_384
"""Events that a subscriber may be behind; then the oldest are dropped, and are missed by it."""


@dataclass
class EventCounts:
    """The numbers of events that one process has published, dropped, received and missed."""

    published: int = 0
    dropped: int = 0
    received: int = 0
    missed: int = 0
    unreadable: int = 0


class EventInbox:
    """A ``dynaplan.events.port.EventSubscription`` that its event plane puts events into.

    It says of each event how many of its publisher's were missed before it. ``on_close`` is awaited once.
    ``on_room`` is called when half of what had arrived is taken, by which a source that was
    stopped goes on.
    """

    def __init__(
        self,
        counts: EventCounts,
        on_close: Callable[[], Awaitable[None]] | None = None,
        most: int = MOST_ARRIVED,
    ) -> None:
        self._counts = counts
        self._most = most
        self._arrived: deque[Event] = deque()
        self._sequences = Sequences()
        self._filled = asyncio.Event()
        self._is_closed = False
        self._has_stopped = False
        self.on_close = on_close
        self.on_room: Callable[[], None] = _nothing

    def put(self, event: Event) -> None:
        """Append an event; the oldest goes when there are too many."""
        self._arrived.append(event)
        if len(self._arrived) > self._most:
            self._arrived.popleft()
        self._filled.set()

    def stops(self) -> bool:
        """Tell a source whether to stop for now; then ``on_room`` is called later."""
        self._has_stopped = self._has_stopped or 2 * len(self._arrived) > self._most
        return self._has_stopped

    def __aiter__(self) -> EventInbox:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event; raises StopAsyncIteration when the subscription is closed."""
        while True:
            while self._arrived and not self._is_closed:
                event = self._taken()
                if event is not None:
                    return event
            if self._is_closed:
                raise StopAsyncIteration
            self._filled.clear()
            await self._filled.wait()

    async def ack(self, event: Event) -> None:
        """Refuse: raises PermanentError, since only a group's events are acknowledged."""
        raise PermanentError("this subscription is of no group: its events need no acknowledgement")

    async def close(self) -> None:
        """End the subscription; what has arrived is dropped."""
        if not self._is_closed:
            self._is_closed = True
            self._filled.set()
            if self.on_close:
                await self.on_close()

    def _taken(self) -> Event | None:
        event = self._arrived.popleft()
        if self._has_stopped and 4 * len(self._arrived) <= self._most:
            self._has_stopped = False
            self.on_room()
        if event.publisher:
            missed = self._sequences.missed(event.publisher, event.sequence)
            if missed is None:
                return None
            if missed:
                self._counts.missed += missed
                event = replace(event, missed=missed)
        self._counts.received += 1
        return event


def _nothing() -> None:
    """Do nothing."""
