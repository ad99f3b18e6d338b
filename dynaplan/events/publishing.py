"""A publisher that numbers its events and leaves them in an outbox, from which its event plane sends them."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from dynaplan.events.envelope import Envelope
from dynaplan.events.inbox import EventCounts
from dynaplan.events.outbox import Outbox, Outgoing
from dynaplan.events.subjects import Subject
from dynaplan.events.wires import TOPICS, EventWire, message_id
from dynaplan.util.errors import PermanentError

LONGEST_PUBLISH_S = 0.1
_ID_BITS = 53
"""Bits of a publisher's id: it is a whole number in every language, as a float too."""


def new_publisher_id() -> int:
    """Return a random number that is no other publisher's, and not 0."""
    return secrets.randbits(_ID_BITS) or 1


def unix_ms() -> int:
    """Return the time of day, in milliseconds."""
    return int(time.time() * 1000)


class BoxedPublisher:
    """A ``dynaplan.events.port.EventPublisher`` that fills an outbox; ``filled`` is set with each event."""

    def __init__(
        self,
        subject: Subject,
        wire: EventWire,
        outbox: Outbox,
        filled: asyncio.Event,
        counts: EventCounts,
        most_bytes: Callable[[], int],
    ) -> None:
        self._topic = TOPICS.get(subject.event, subject.event)
        self._subject = wire.subject(subject)
        self._wire = wire
        self._outbox = outbox
        self._filled = filled
        self._counts = counts
        self._most_bytes = most_bytes
        self._publisher = new_publisher_id()
        self._next = 0
        self._is_stuck = False

    async def publish(self, payload: bytes) -> int:
        """Put the event into the outbox; return its sequence number."""
        if len(payload) > self._most_bytes():
            raise PermanentError(f"an event of {len(payload)} bytes is too large: {self._subject}")
        sequence, self._next = self._next, self._next + 1
        envelope = Envelope(self._publisher, sequence, unix_ms(), self._topic, payload)
        data = self._wire.message(envelope)
        self._outbox.push(Outgoing(self._subject, data, message_id(self._publisher, sequence)))
        self._counts.published += 1
        self._filled.set()
        if not self._outbox.is_half_full:
            self._is_stuck = False
        elif not self._is_stuck:
            self._is_stuck = not await self._sender_gets_on()
        return sequence

    async def _sender_gets_on(self) -> bool:
        """Wait while the sender makes room; False when it does nothing, as when the server is away."""
        loop = asyncio.get_running_loop()
        before, deadline_s = len(self._outbox), loop.time() + LONGEST_PUBLISH_S
        while self._outbox.is_half_full and loop.time() < deadline_s:
            await asyncio.sleep(0.001)
            if len(self._outbox) < before:
                before, deadline_s = len(self._outbox), loop.time() + LONGEST_PUBLISH_S
        return not self._outbox.is_half_full
