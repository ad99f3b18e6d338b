"""Ports to what connects processes beside the store: messages, work queues, and the event plane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
        """Acknowledge a group's event: it is not delivered again."""
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


class WorkItem(Protocol):
    """One piece of work taken from a queue: delivered again, to any worker, unless acknowledged in time."""

    payload: bytes

    @property
    def deliveries(self) -> int:
        """The number of its deliveries, this one included; restarts when the queue's server does."""
        ...

    async def ack(self) -> None:
        """Acknowledge the work: it is never delivered again."""
        ...

    async def in_progress(self) -> None:
        """Report progress: the time allowed for the work restarts."""
        ...


class WorkQueue(Protocol):
    """A queue that gives each piece of work to one worker.

    It has lanes: work in the lane of a taker is given to that one alone, work in the shared queue to the one
    that asks first. Work that nobody has acknowledged within ``QUEUE_MAX_AGE_S`` (``events/timing.py``) is
    dropped. Every method raises QueueUnavailable when the queue does not answer.
    """

    async def put(self, payload: bytes) -> int:
        """Append the work; return its sequence number."""
        ...

    async def get(self, timeout_s: float) -> WorkItem | None:
        """Take the next piece of work; None when there is none within ``timeout_s`` seconds."""
        ...

    async def remove(self, sequence: int) -> None:
        """Withdraw work that nobody needs any more; nothing happens when it is gone already."""
        ...

    async def depth(self) -> int:
        """Return the number of pieces of work not done: waiting, or taken and not acknowledged.

        Of the shared queue: with those in all lanes.
        """
        ...

    async def clear(self) -> None:
        """Withdraw all work of a lane, taken or not; of the shared queue that in all lanes too."""
        ...


class Messenger(Closable, Protocol):
    """Fire-and-forget messages. Methods raise QueueUnavailable when the server does not answer."""

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send the payload to the present subscribers of the subject."""
        ...

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        """Call ``receive(subject, payload)`` for every message; a ``>`` at the end matches any rest."""
        ...

    async def queue(self, stream: str, taker: str = "") -> WorkQueue:
        """Return the durable work queue of that stream, or the lane of a taker in it, made when missing."""
        ...
