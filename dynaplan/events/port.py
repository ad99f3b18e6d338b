"""Ports to the event plane: publishing events, and subscribing to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dynaplan.events.subjects import NOW, Event, Start, Subject
from dynaplan.util.connection import Closable


class EventPublisher(Protocol):
    """Publishes the events of one subject, in order."""

    async def publish(self, payload: bytes) -> int:
        """Send the event, now or when the server is back; return its sequence number, from 0.

        Waits a little when events come faster than they can be sent. While the server is away events are kept
        up to a bound; then the oldest are dropped, and counted. Raises PermanentError when it is too large.
        """
        ...


class EventSubscription(Closable, Protocol):
    """The events of one subscription, until it is closed."""

    def __aiter__(self) -> EventSubscription:
        """Return the subscription."""
        ...

    async def __anext__(self) -> Event:
        """Return the next event; raises StopAsyncIteration when the subscription is closed."""
        ...

    async def ack(self, event: Event) -> None:
        """Tell that a group's event is done: it is not delivered again."""
        ...


class EventPlane(Closable, Protocol):
    """A way for events to travel, and to be kept for later subscribers where that is asked for.

    ``close`` sends what waits, if that is done within a second, and ends every subscription.
    """

    def publisher(self, subject: Subject, *, is_kept: bool) -> EventPublisher:
        """Return a publisher; its events are kept for later subscribers if ``is_kept``."""
        ...

    async def subscribe(self, pattern: str, start: Start = NOW, group: str = "") -> EventSubscription:
        """Subscribe to the subjects that match, from ``start`` on.

        Of a group's members each event comes to one, again unless it is acknowledged in time. Raises
        QueueUnavailable when the server does not answer, ConfigError for what this way cannot do.
        """
        ...

    async def flush(self, timeout_s: float) -> bool:
        """Wait until all that was published is sent; False when it is not in that time."""
        ...

    def continuity(self) -> int | None:
        """Return a number that changes when a connection was lost, and events with it; None while away."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Return the numbers of events: ``published``, ``dropped``, ``waiting``, ``received``, ``missed``."""
        ...
