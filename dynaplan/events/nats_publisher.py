"""Publishing events on NATS.

1. A **publisher** numbers its events and puts them into an outbox.
2. A **sender** empties the outbox onto the server, in order, and waits while the server is down. Beyond a
   bound the oldest events are dropped, and counted.
3. Events that are kept go to a **stream** of JetStream: one for each component, with its kept events'
   subjects.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dynaplan.events.subjects import EventCounts, Subject
from dynaplan.events.timing import (
    EVENT_ANSWER_TIMEOUT_S,
    EVENT_DUPLICATE_WINDOW_S,
    EVENT_PUBLISH_WAIT_MAX_S,
    EVENT_RETRY_MAX_S,
    EVENT_RETRY_MIN_S,
)
from dynaplan.events.wire_formats import MESSAGE_ID, TOPICS, Envelope, WireFormat, message_id
from dynaplan.store.nats_connection import DAMAGED_CODES, remove_damaged_stream
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import PermanentError, QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.js.api import StreamConfig, StreamInfo

    from dynaplan.store.nats_connection import NatsConnection

MAX_OUTBOX_EVENTS = 16_384
MAX_OUTBOX_BYTES = 64 * 2**20
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
    """Messages that wait to be sent, in order: at most ``most`` messages, and ``most_bytes`` in all.

    Beyond either the oldest are dropped; ``dropped`` counts these. ``filled`` is set with each message.
    """

    most: int = MAX_OUTBOX_EVENTS
    most_bytes: int = MAX_OUTBOX_BYTES
    dropped: int = 0
    filled: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _waiting: deque[Outgoing] = field(default_factory=deque, init=False)
    _bytes: int = field(default=0, init=False)

    def __len__(self) -> int:
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
    return int(time.time() * 1000)


class OutboxPublisher:
    """A ``dynaplan.events.port.EventPublisher`` that fills an outbox, from which its event plane sends."""

    def __init__(
        self,
        subject: Subject,
        wire: WireFormat,
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
        before, deadline_s = len(self._outbox), loop.time() + EVENT_PUBLISH_WAIT_MAX_S
        while self._outbox.is_half_full and loop.time() < deadline_s:
            await asyncio.sleep(0.001)
            if len(self._outbox) < before:
                before, deadline_s = len(self._outbox), loop.time() + EVENT_PUBLISH_WAIT_MAX_S
        return not self._outbox.is_half_full


log = logging.getLogger(__name__)

# The server sets this room aside for each stream: the embedded one has 1 GB for all.
MAX_BYTES = 64 * 2**20


def stream_name(namespace: str, component: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{namespace}_{component}_events")


async def ensure_stream(connection: NatsConnection, name: str, subject: str, age_s: float) -> StreamInfo:
    """Return the stream, made or widened so that it keeps the subject.

    Two processes that widen it at once may undo each other's work: a publisher notices, and retries.
    """
    from nats.js.errors import APIError, NotFoundError

    async with connection.call() as client:
        manager = client.jsm()
        try:
            found = await manager.stream_info(name)
        except NotFoundError:
            return await manager.add_stream(_stream_config(name, [subject], age_s))
        except APIError as error:
            if error.err_code not in DAMAGED_CODES:
                raise
            await remove_damaged_stream(manager, name, error)
            return await manager.add_stream(_stream_config(name, [subject], age_s))
        subjects = list(found.config.subjects or ())
        if subject in subjects and found.config.max_age == age_s:
            return found
        config = replace(found.config, subjects=sorted({*subjects, subject}), max_age=age_s)
        return await manager.update_stream(config)


async def find_stream(connection: NatsConnection, name: str, pattern: str, age_s: float) -> StreamInfo:
    """Return the stream for a pattern: made when the pattern is a subject, else only found."""
    if not {"*", ">"} & set(pattern):
        return await ensure_stream(connection, name, pattern, age_s)
    async with connection.call() as client:
        return await client.jsm().stream_info(name)


def _stream_config(name: str, subjects: list[str], age_s: float) -> StreamConfig:
    from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

    return StreamConfig(
        name=name,
        subjects=subjects,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_age=age_s,
        max_bytes=MAX_BYTES,
        duplicate_window=min(EVENT_DUPLICATE_WINDOW_S, age_s),
        num_replicas=1,
    )


SEND_BATCH = 256
SEND_WINDOW = 512
"""Events on their way that the server has not answered for."""


class NatsSender:
    """Sends events to the present subscribers; those in flight when the connection breaks are lost."""

    def __init__(self, connection: NatsConnection) -> None:
        self.outbox = Outbox()
        self._connection = connection
        self._busy = 0

    @property
    def waiting(self) -> int:
        """The number of events that are not sent yet."""
        return len(self.outbox) + self._busy

    async def run(self) -> None:
        """Send everything that is put into the outbox, until cancelled."""
        backoff = Backoff(EVENT_RETRY_MIN_S, EVENT_RETRY_MAX_S)
        while True:
            await self.outbox.filled.wait()
            self.outbox.filled.clear()
            try:
                while self.waiting:
                    await self.send()
                    backoff.reset()
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("events wait for NATS: %s", error)
                self.outbox.filled.set()
                await backoff.pause()

    async def send(self) -> None:
        """Send a batch, and wait until the server has it; raises QueueUnavailable."""
        try:
            async with self._connection.call() as client:
                while self.outbox and self._busy < SEND_BATCH:
                    self._busy += 1
                    await self._publish(client, self.outbox.pop())
                await self._connection.round_trip()
        finally:
            self._busy = 0

    async def _publish(self, client: Client, message: Outgoing, reply: str = "") -> bool:
        """Send one message; False, and it is dropped, when no server would take it."""
        from nats.errors import BadSubjectError, MaxPayloadError

        try:
            headers = {MESSAGE_ID: message.message_id}
            await client.publish(message.subject, message.data, reply=reply, headers=headers)
        except (MaxPayloadError, BadSubjectError) as error:
            self.outbox.dropped += 1
            log.warning("an event of %s is dropped: %s", message.subject, error)
            return False
        return True


class StreamSender(NatsSender):
    """Sends events to a stream, each until the server has stored it.

    The server drops an event that it gets twice, by its id. An event without an answer is sent again unless a
    later one is stored: then it is given up, since what is stored has to be in order.
    """

    def __init__(self, connection: NatsConnection, stream: str, age_s: float) -> None:
        super().__init__(connection)
        self._stream = stream
        self._age_s = age_s
        self._inbox = ""
        self._numbers = itertools.count(1)
        self._unacknowledged: dict[int, Outgoing] = {}
        self._answered = asyncio.Event()
        self._last_stored = 0
        self._fault: Exception | None = None
        self._subjects: set[str] = set()
        self._is_damaged = False
        connection.on_reconnect(self._on_reconnect)

    @property
    def waiting(self) -> int:
        """The number of events that are not stored yet."""
        return len(self.outbox) + len(self._unacknowledged)

    async def send(self) -> None:
        """Send and wait until all is stored, or raise QueueUnavailable, with the rest back in the outbox."""
        if not self._inbox:
            await self._listen()
        window, self._fault = 1, None  # One at first: the next ones only when the stream is surely there.
        try:
            while self.waiting:
                async with self._connection.call() as client:
                    while self.outbox and len(self._unacknowledged) < window:
                        await self._send_next(client)
                await self._progress()
                window = SEND_WINDOW
        finally:
            self._requeue_unacknowledged()

    async def _listen(self) -> None:
        async with self._connection.call() as client:
            inbox = client.new_inbox()
        await self._connection.add_subscription(f"{inbox}.*", self._on_answer)
        self._inbox = inbox

    async def _send_next(self, client: Client) -> None:
        message = self.outbox.pop()
        number = next(self._numbers)
        self._unacknowledged[number] = message
        if message.subject not in self._subjects or self._is_damaged:
            await self._ensure(message.subject)
        if not await self._publish(client, message, f"{self._inbox}.{number}"):
            del self._unacknowledged[number]

    async def _ensure(self, subject: str) -> None:
        if self._is_damaged:
            async with self._connection.call() as client:
                await remove_damaged_stream(client.jsm(), self._stream, self._fault)
            self._is_damaged = False
        await ensure_stream(self._connection, self._stream, subject, self._age_s)
        self._subjects.add(subject)

    async def _progress(self) -> None:
        """Wait for an answer; raises QueueUnavailable when none comes, or a refusal."""
        self._answered.clear()
        if self._fault is None and self._unacknowledged:
            try:
                async with asyncio.timeout(EVENT_ANSWER_TIMEOUT_S):
                    await self._answered.wait()
            except TimeoutError:
                self._fault = QueueUnavailable("NATS does not answer for events")
        if self._fault is not None:
            raise QueueUnavailable(str(self._fault)) from self._fault

    async def _on_answer(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        if number not in self._unacknowledged:
            return
        fault = self._parse_refusal(message)
        if fault is None:
            del self._unacknowledged[number]
            self._last_stored = max(self._last_stored, number)
        else:
            self._fault = fault
            self._subjects.clear()
        self._answered.set()

    def _parse_refusal(self, message: Msg) -> Exception | None:
        """The reason for which the server has not stored an event; None when it has."""
        if (message.headers or {}).get("Status"):
            return QueueUnavailable("no stream takes the events")
        if b'"error"' not in message.data:
            return None
        error = json.loads(message.data).get("error", {})
        self._is_damaged = error.get("err_code") in DAMAGED_CODES
        return QueueUnavailable(f"NATS does not store events: {error.get('description', error)}")

    def _on_reconnect(self) -> None:
        """End the wait for answers on the old connection, so that unanswered events are sent again."""
        self._subjects.clear()
        self._fault = QueueUnavailable("the connection was lost")
        self._answered.set()

    def _requeue_unacknowledged(self) -> None:
        """Put unacknowledged events back into the outbox; one that a later event has overtaken is dropped."""
        left = sorted(self._unacknowledged.items())
        self._unacknowledged.clear()
        again = [message for number, message in left if number > self._last_stored]
        self.outbox.dropped += len(left) - len(again)
        self.outbox.put_back(again)
