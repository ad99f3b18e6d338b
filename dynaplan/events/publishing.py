"""Publishing: a publisher numbers its events and leaves them in an outbox, from which they are sent."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dynaplan.events.inbox import EventCounts
from dynaplan.events.subjects import Subject
from dynaplan.events.wires import TOPICS, Envelope, EventWire, message_id
from dynaplan.util.errors import PermanentError

MOST_WAITING = 16_384
MOST_WAITING_BYTES = 64 * 2**20
LONGEST_PUBLISH_S = 0.1
_ID_BITS = 53
"""Bits of a publisher's id: it is a whole number in every language, as a float too."""


@dataclass(frozen=True)
class Outgoing:
    """One message with its subject and its id."""

    subject: str
    data: bytes
    message_id: str


@dataclass
class Outbox:
    """Messages that wait to be sent, in order: at most ``most`` of at most ``most_bytes`` together.

    Beyond that the oldest are dropped; ``dropped`` counts what was lost. ``filled`` is set with each message.
    """

    most: int = MOST_WAITING
    most_bytes: int = MOST_WAITING_BYTES
    dropped: int = 0
    filled: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _waiting: deque[Outgoing] = field(default_factory=deque, init=False)
    _bytes: int = field(default=0, init=False)

    def __len__(self) -> int:
        """Return the number of messages that wait."""
        return len(self._waiting)

    @property
    def is_half_full(self) -> bool:
        """True when the publisher should wait for the sender."""
        return 2 * len(self._waiting) > self.most or 2 * self._bytes > self.most_bytes

    def push(self, message: Outgoing) -> None:
        """Append a message; drop the oldest ones when there is no room."""
        self._waiting.append(message)
        self._bytes += len(message.data)
        self._make_room()
        self.filled.set()

    def pop(self) -> Outgoing:
        """Take the oldest message; raises IndexError when there is none."""
        message = self._waiting.popleft()
        self._bytes -= len(message.data)
        return message

    def put_back(self, messages: Iterable[Outgoing]) -> None:
        """Put messages that were not sent before the others, in their order."""
        for message in reversed(list(messages)):
            self._waiting.appendleft(message)
            self._bytes += len(message.data)
        self._make_room()

    def _make_room(self) -> None:
        while len(self._waiting) > self.most or (self._bytes > self.most_bytes and len(self._waiting) > 1):
            self.pop()
            self.dropped += 1


def new_publisher_id() -> int:
    """Return a random number that is no other publisher's, and not 0."""
    return secrets.randbits(_ID_BITS) or 1


def unix_ms() -> int:
    """Return the time of day, in milliseconds."""
    return int(time.time() * 1000)


class OutboxPublisher:
    """A ``dynaplan.events.port.EventPublisher`` that fills an outbox, from which its event plane sends."""

    def __init__(
        self,
        subject: Subject,
        wire: EventWire,
        outbox: Outbox,
        counts: EventCounts,
        most_bytes: Callable[[], int],
    ) -> None:
        self._topic = TOPICS.get(subject.event, subject.event)
        self._subject = wire.subject(subject)
        self._wire = wire
        self._outbox = outbox
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
        if not self._outbox.is_half_full:
            self._is_stuck = False
        elif not self._is_stuck:
            self._is_stuck = not await self._sender_makes_progress()
        return sequence

    async def _sender_makes_progress(self) -> bool:
        """Wait while the sender makes room; False when it does nothing, as when the server is away."""
        loop = asyncio.get_running_loop()
        before, deadline_s = len(self._outbox), loop.time() + LONGEST_PUBLISH_S
        while self._outbox.is_half_full and loop.time() < deadline_s:
            await asyncio.sleep(0.001)
            if len(self._outbox) < before:
                before, deadline_s = len(self._outbox), loop.time() + LONGEST_PUBLISH_S
        return not self._outbox.is_half_full
