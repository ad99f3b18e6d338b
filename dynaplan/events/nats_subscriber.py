"""Subscribing to events on NATS: an inbox per subscription, and the reader that fills it from a stream.

A reader reads the events that a stream keeps, through outages: all of them, or a group's share of them. It
has a pull consumer of JetStream: an ephemeral one that acknowledges nothing, or its group's durable one. It
asks for as many messages as its inbox has room for, and takes them as they come. When anything is amiss (a
lost connection, a consumer that is gone, a message that did not arrive) it resumes behind the last message
that it has read, and at the beginning of a stream that was made again.

nats-py's own means do not do this: its ordered consumer continues at its old position in a stream that was
made again, and a ``fetch`` of several messages waits for all of them while a ``fetch`` of one costs a round
trip each.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dynaplan.events.nats_publisher import find_stream
from dynaplan.events.subjects import KEPT, Event, EventCounts, Start
from dynaplan.events.timing import (
    EVENT_CONSUMER_IDLE_S,
    EVENT_PULL_S,
    EVENT_RETRY_MAX_S,
    EVENT_RETRY_MIN_S,
    PULL_GRACE_S,
)
from dynaplan.events.wire_formats import MESSAGE_ID, WireFormat
from dynaplan.store.nats_connection import EMPTY_STATUSES
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import PermanentError, QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.api import ConsumerConfig

    from dynaplan.store.nats_connection import NatsConnection

log = logging.getLogger(__name__)

MAX_PULL = 256
"""Most messages of one pull."""


MAX_LOGGED_FAULTS = 1000


class MessageReader:
    """Reads messages as events; names each fault of a subject once, and skips what cannot be read."""

    def __init__(self, wire: WireFormat, counts: EventCounts) -> None:
        self._wire = wire
        self._counts = counts
        self._logged_faults: set[tuple[str, str]] = set()

    def read(self, message: Msg) -> Event | None:
        """Return the message's event; None for an invalid one."""
        message_id = (message.headers or {}).get(MESSAGE_ID, "")
        try:
            return self._wire.event(message.subject, message.data, message_id)
        except ValueError as error:
            self._counts.unreadable += 1
            fault = message.subject, str(error)
            if fault not in self._logged_faults and len(self._logged_faults) < MAX_LOGGED_FAULTS:
                self._logged_faults.add(fault)
                log.warning("skipping what is no event on %s: %s", *fault)
            return None


@dataclass(frozen=True)
class Source:
    """The events of one subject, or pattern, of a component's stream, and the group that shares them, if any.

    ``age_s`` is for how long the stream keeps events. An event of a group that is not acknowledged within
    ``ack_wait_s`` is delivered again.
    """

    stream: str
    pattern: str
    age_s: float
    start: Start
    group: str = ""
    ack_wait_s: float = 0.0


class StreamReader:
    """Fills an inbox with the kept events of a source."""

    def __init__(
        self, connection: NatsConnection, source: Source, reader: MessageReader, inbox: EventInbox
    ) -> None:
        self._connection = connection
        self._source = source
        self._start = source.start
        self._reader = reader
        self._inbox = inbox
        self._created = ""
        self._delivered = 0
        self._wanted = 0
        self._heard = asyncio.Event()
        self._fault = ""

    async def run(self) -> None:
        """Fill the inbox until cancelled."""
        forget = self._connection.on_reconnect(lambda: self._fail("the connection was lost"))
        backoff = Backoff(EVENT_RETRY_MIN_S, EVENT_RETRY_MAX_S)
        try:
            while True:
                try:
                    await self._consume(backoff)
                except QueueUnavailable as error:
                    if backoff.is_first:
                        log.info("reading %s again: %s", self._source.pattern, error)
                    await backoff.pause()
        finally:
            forget()

    async def ensure_consumer(self) -> str:
        """Make the consumer, unless the group has one; return its name. Raises QueueUnavailable."""
        from nats.js.errors import NotFoundError

        await self._find_stream()
        source, config = self._source, self._consumer_config()
        async with self._connection.call() as client:
            manager = client.jsm()
            try:
                if not source.group:
                    raise NotFoundError
                await manager.consumer_info(source.stream, str(config.durable_name))
            except NotFoundError:
                await manager.add_consumer(source.stream, config)
        if source.group:
            # A group whose consumer has to be made again has lost its place: it starts with all that is kept.
            self._start = KEPT
        return str(config.durable_name or config.name)

    async def _find_stream(self) -> None:
        """Check whether the stream is the one that was read before; another is read from its beginning."""
        source = self._source
        found = await find_stream(self._connection, source.stream, source.pattern, source.age_s)
        created = str(found.created)
        if self._created and self._created != created:
            log.warning("the stream %s was made again: reading it from its beginning", source.stream)
            self._start = KEPT
        self._created = created

    def _consumer_config(self) -> ConsumerConfig:
        from nats.js.api import AckPolicy, ConsumerConfig

        source = self._source
        shared = {"filter_subject": source.pattern, **_start_config(self._start)}
        if source.group:
            return ConsumerConfig(
                durable_name=re.sub(r"[^A-Za-z0-9_-]", "_", source.group),
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=source.ack_wait_s,
                inactive_threshold=source.age_s,
                **shared,
            )
        return ConsumerConfig(
            name=secrets.token_hex(8),
            ack_policy=AckPolicy.NONE,
            inactive_threshold=EVENT_CONSUMER_IDLE_S,
            mem_storage=True,
            num_replicas=1,
            **shared,
        )

    async def _consume(self, backoff: Backoff) -> None:
        """Make a consumer, and take what it delivers until something is amiss: raises QueueUnavailable."""
        self._fault, self._delivered, self._wanted = "", 0, 0
        async with self._connection.call() as client:
            address = client.new_inbox()
        number = await self._connection.add_subscription(address, self._on_message)
        try:
            consumer = await self.ensure_consumer()
            while True:
                self._wanted = min(await self._inbox.room(), MAX_PULL)
                await self._ask(consumer, address)
                await self._answered()
                backoff.reset()
        finally:
            await self._connection.unsubscribe(number)

    async def _ask(self, consumer: str, address: str) -> None:
        """Ask for as many messages as are wanted."""
        body = json.dumps({"batch": self._wanted, "expires": int(EVENT_PULL_S * 1e9)}).encode()
        async with self._connection.call() as client:
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._source.stream}.{consumer}"
            await client.publish(subject, body, reply=address)

    async def _answered(self) -> None:
        """Return when all have arrived, or the server has no more now; raises QueueUnavailable."""
        try:
            while self._wanted and not self._fault:
                self._heard.clear()
                async with asyncio.timeout(EVENT_PULL_S + PULL_GRACE_S):
                    await self._heard.wait()
        except TimeoutError as error:
            raise QueueUnavailable("the stream is silent") from error
        if self._fault:
            raise QueueUnavailable(self._fault)

    async def _on_message(self, message: Msg) -> None:
        headers = message.headers or {}
        status = headers.get("Status")
        if status is None:
            self._accept(message)
        elif status in EMPTY_STATUSES:
            self._wanted = 0
        else:
            self._fail(headers.get("Description") or f"the server answers with {status}")
        self._heard.set()

    def _accept(self, message: Msg) -> None:
        """Put the message's event into the inbox."""
        if self._fault:
            return
        self._wanted = max(0, self._wanted - 1)
        if self._source.group:
            self._accept_of_group(message)
        else:
            self._accept_next(message)

    def _accept_next(self, message: Msg) -> None:
        """Take the message; notice when one before it did not arrive."""
        sequence = message.metadata.sequence
        self._delivered += 1
        if sequence.consumer != self._delivered:
            self._fail("an event did not arrive")
            return
        self._start = Start(position=sequence.stream + 1)
        event = self._reader.read(message)
        if event is not None:
            self._inbox.put(replace(event, position=sequence.stream))

    def _accept_of_group(self, message: Msg) -> None:
        """Take a message of the group, or give it back to it when nobody waits here any more."""
        if not self._inbox.is_awaited:
            self._connection.publish_soon(message.reply, b"-NAK")
            return
        event = self._reader.read(message)
        if event is None:  # What cannot be read does not come again.
            self._connection.publish_soon(message.reply, b"+ACK")
        else:
            position = message.metadata.sequence.stream
            self._inbox.put(replace(event, position=position, receipt=message.reply))

    def _fail(self, fault: str) -> None:
        self._fault = self._fault or fault
        self._heard.set()


def _start_config(start: Start) -> dict[str, Any]:
    """Return the fields of a consumer that begins there."""
    from nats.js.api import DeliverPolicy

    if start.position is not None and start.position >= 1:
        return {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": start.position}
    if start.position is not None:
        return {"deliver_policy": DeliverPolicy.ALL}
    if start.unix_s is not None:
        time = datetime.fromtimestamp(start.unix_s, UTC).isoformat()
        return {"deliver_policy": DeliverPolicy.BY_START_TIME, "opt_start_time": time}
    return {"deliver_policy": DeliverPolicy.NEW}


MAX_INBOX_EVENTS = 16_384
"""Events that a subscriber may be behind; then the oldest are dropped, and are missed by it."""

MAX_PUBLISHERS = 4096
"""The number of publishers whose numbers are remembered: those heard last."""


class Sequences:
    """The next sequence number that is expected of each publisher."""

    def __init__(self, most: int = MAX_PUBLISHERS) -> None:
        self._most = most
        self._next: dict[int, int] = {}

    def missed(self, publisher: int, sequence: int) -> int | None:
        """Note an event; return how many of its publisher's were missed before it.

        None when this event, or a later one of the publisher, was noted already.
        """
        expected = self._next.pop(publisher, 0)
        self._next[publisher] = max(expected, sequence + 1)
        if len(self._next) > self._most:
            del self._next[next(iter(self._next))]
        return sequence - expected if sequence >= expected else None


class EventInbox:
    """A ``dynaplan.events.port.EventSubscription`` that its event plane puts events into.

    Each event carries how many of its publisher's were missed before it, unless it is a group's: then
    ``acknowledge`` is awaited with each event that is done. ``on_close`` is awaited once.
    """

    def __init__(
        self,
        counts: EventCounts,
        acknowledge: Callable[[Event], Awaitable[None]] | None = None,
    ) -> None:
        self._counts = counts
        self._acknowledge = acknowledge
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
        if len(self._arrived) > MAX_INBOX_EVENTS:
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
            wanted = (self._takers if self._acknowledge else MAX_INBOX_EVENTS) - len(self._arrived)
            if wanted >= (1 if self._acknowledge else MAX_INBOX_EVENTS // 2):
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
                    event = self._accept()
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

    def _accept(self) -> Event | None:
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
