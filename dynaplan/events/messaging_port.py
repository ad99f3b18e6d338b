"""Ports to the messaging server: messages, and work queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dynaplan.util.connection import Closable

LONGEST_IN_QUEUE_S = 600.0
"""Seconds after which a queue drops work that nobody has acknowledged."""


class WorkItem(Protocol):
    """One piece of work taken from a queue: delivered again, to any worker, unless acknowledged in time."""

    payload: bytes

    @property
    def deliveries(self) -> int:
        """The number of its deliveries, this one included; starts anew when the queue's server does."""
        ...

    async def ack(self) -> None:
        """Tell the queue that the work is done: it is never delivered again."""
        ...

    async def in_progress(self) -> None:
        """Tell the queue that the work goes on: the time allowed for it starts anew."""
        ...


class WorkQueue(Protocol):
    """A queue that gives each piece of work to one worker.

    It has lanes: work in the lane of a taker is given to that one alone, work in the shared queue to the one
    that asks first. Work that nobody has acknowledged within ``LONGEST_IN_QUEUE_S`` is dropped. Every method
    raises QueueUnavailable when the queue does not answer.
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
