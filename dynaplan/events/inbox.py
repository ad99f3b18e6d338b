"""Events that have arrived for one subscription and were not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from dynaplan.events.subjects import Event
from dynaplan.util.errors import PermanentError

MOST_ARRIVED = 16_384
"""Events that a subscriber may be behind; then the oldest are dropped, and are missed by it."""

MOST_PUBLISHERS = 4096
"""The number of publishers whose numbers are remembered: those heard last."""


@dataclass
class EventCounts:
    """The numbers of events that one process has published, dropped, received and missed."""

    published: int = 0
    dropped: int = 0
    received: int = 0
    missed: int = 0
    unreadable: int = 0


class Sequences:
    """The next sequence number that is expected of each publisher."""

    def __init__(self, most: int = MOST_PUBLISHERS) -> None:
        self._most = most
        self._next: dict[int, int] = {}

    def missed(self, publisher: int, sequence: int) -> int | None:
        """Note an event; return the number of events missed before it, or None when it was had already."""
        expected = self._next.pop(publisher, 0)
        self._next[publisher] = max(expected, sequence + 1)
        if len(self._next) > self._most:
            del self._next[next(iter(self._next))]
        return sequence - expected if sequence >= expected else None


class EventInbox:
    """A ``dynaplan.events.port.EventSubscription`` that its event plane puts events into.

    It says of each event how many of its publisher's were missed before it, unless it is a group's: then
    ``acknowledge`` is awaited with each event that is done. ``on_close`` is awaited once.
    """

    def __init__(
        self,
        counts: EventCounts,
        acknowledge: Callable[[Event], Awaitable[None]] | None = None,
        most: int = MOST_ARRIVED,
    ) -> None:
        self._counts = counts
        self._acknowledge = acknowledge
        self._most = most
        self._arrived: deque[Event] = deque()
        self._sequences = Sequences()
        self._filled = asyncio.Event()
        self._changed = asyncio.Event()
        self._takers = 0
        self._is_closed = False
        self.on_close: Callable[[], Awaitable[None]] | None = None

    def put(self, event: Event) -> None:
        """Append an event; the oldest goes when there are too many."""
        self._arrived.append(event)
        if len(self._arrived) > self._most:
            self._arrived.popleft()
        self._filled.set()

    @property
    def is_awaited(self) -> bool:
        """True while somebody waits for an event that has not arrived."""
        return self._takers > len(self._arrived)

    async def room(self) -> int:
        """Wait until events are wanted, and return how many.

        Of a group's events those that somebody waits for; otherwise what there is room for, once that is half
        of what may arrive.
        """
        while True:
            wanted = (self._takers if self._acknowledge else self._most) - len(self._arrived)
            if wanted >= (1 if self._acknowledge else self._most // 2):
                return wanted
            self._changed.clear()
            await self._changed.wait()

    def __aiter__(self) -> EventInbox:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event; raises StopAsyncIteration when the subscription is closed."""
        self._takers += 1
        self._changed.set()
        try:
            while True:
                while self._arrived and not self._is_closed:
                    event = self._take()
                    if event is not None:
                        return event
                if self._is_closed:
                    raise StopAsyncIteration
                self._filled.clear()
                await self._filled.wait()
        finally:
            self._takers -= 1

    async def ack(self, event: Event) -> None:
        """Tell that a group's event is done; raises PermanentError for an event of no group."""
        if self._acknowledge is None or not event.receipt:
            raise PermanentError("this event is of no group: it needs no acknowledgement")
        await self._acknowledge(event)

    async def close(self) -> None:
        """End the subscription; what has arrived is dropped."""
        if not self._is_closed:
            self._is_closed = True
            self._filled.set()
            if self.on_close:
                await self.on_close()

    def _take(self) -> Event | None:
        event = self._arrived.popleft()
        self._changed.set()
        if event.publisher and not event.receipt:
            missed = self._sequences.missed(event.publisher, event.sequence)
            if missed is None:
                return None
            if missed:
                self._counts.missed += missed
                event = replace(event, missed=missed)
        self._counts.received += 1
        return event
