"""The event plane on a NATS server: JetStream keeps what is to be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakSet

from dynaplan.config.settings.servers import MAX_AGE_S, max_age_s
from dynaplan.events.nats_publisher import NatsSender, OutboxPublisher, StreamSender, stream_name
from dynaplan.events.nats_subscriber import EventInbox, MessageReader, Source, StreamReader
from dynaplan.events.port import EventPublisher, EventSubscription
from dynaplan.events.subjects import NOW, Event, EventCounts, Start, Subject
from dynaplan.events.timing import EVENT_ACK_WAIT_S, EVENT_CLOSE_TIMEOUT_S
from dynaplan.events.wire_formats import PlainFormat, WireFormat
from dynaplan.store.nats_connection import UNLIMITED, NatsConnection
from dynaplan.util.errors import ConfigError
from dynaplan.util.tasks import BackgroundTasks

if TYPE_CHECKING:
    from nats.aio.msg import Msg


HEAD_BYTES = 512
"""Room in a message for what its wire form adds to the payload."""


class NatsEventPlane:
    """``dynaplan.events.port.EventPlane`` on NATS; made by ``from_environment``."""

    def __init__(
        self,
        connection: NatsConnection,
        wire: WireFormat,
        age_s: float = MAX_AGE_S,
        ack_wait_s: float = EVENT_ACK_WAIT_S,
    ) -> None:
        self._connection = connection
        self._wire = wire
        self._age_s = age_s
        self._ack_wait_s = ack_wait_s
        self._counts = EventCounts()
        self._tasks = BackgroundTasks()
        self._senders: dict[str, NatsSender] = {}
        self._inboxes: WeakSet[EventSubscription] = WeakSet()
        self._connects = 0
        connection.on_reconnect(self._count_connect)

    @classmethod
    async def from_environment(
        cls,
        environ: Mapping[str, str],
        wire: WireFormat | None = None,
        max_reconnects: int = UNLIMITED,
        ack_wait_s: float = EVENT_ACK_WAIT_S,
    ) -> NatsEventPlane:
        """Return an event plane on a connection from ``NatsConnection.from_environment``.

        Raises its errors, and ConfigError for a wrong setting of events.
        """
        age_s = max_age_s(environ)
        connection = await NatsConnection.from_environment(environ, max_reconnects)
        return cls(connection, wire or PlainFormat(), age_s, ack_wait_s)

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    def publisher(self, subject: Subject, *, is_kept: bool) -> EventPublisher:
        """Return a publisher; kept events go to the component's stream."""
        sender = self._sender(stream_name(subject.namespace, subject.component) if is_kept else "")
        return OutboxPublisher(
            subject,
            self._wire,
            sender.outbox,
            self._counts,
            lambda: self._connection.max_payload_bytes - HEAD_BYTES,
        )

    async def subscribe(self, pattern: str, start: Start = NOW, group: str = "") -> EventSubscription:
        """Subscribe; for a group or from an earlier event on, to the events that are kept."""
        reader = MessageReader(self._wire, self._counts)
        if start.is_now and not group:
            return await self._subscribe_live(pattern, reader)
        stream, written = self._stream_of(pattern)
        source = Source(stream, written, self._age_s, start, group, self._ack_wait_s)
        inbox = EventInbox(self._counts, self._acknowledge if group else None)
        stream_reader = StreamReader(self._connection, source, reader, inbox)
        if group:
            await stream_reader.ensure_consumer()
        self._inboxes.add(inbox)
        reading = self._tasks.spawn(stream_reader.run(), "event stream")

        async def stop() -> None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        inbox.on_close = stop
        return inbox

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the server has everything."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(sender.waiting for sender in self._senders.values()):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            return False
        return True

    def continuity(self) -> int | None:
        """Return the number of connects so far; None while there is no connection."""
        return self._connects if self.is_connected else None

    def counts(self) -> Mapping[str, int]:
        """Count what this plane has published, dropped and received, and what waits in its outboxes."""
        senders = self._senders.values()
        return {
            **vars(self._counts),
            "dropped": sum(sender.outbox.dropped for sender in senders),
            "waiting": sum(sender.waiting for sender in senders),
        }

    async def close(self) -> None:
        """Send what waits, within a second, and end everything."""
        if self.is_connected:
            await self.flush(EVENT_CLOSE_TIMEOUT_S)
        for inbox in list(self._inboxes):
            await inbox.close()
        await self._tasks.cancel()
        await self._connection.close()

    def _count_connect(self) -> None:
        self._connects += 1

    def _sender(self, stream: str) -> NatsSender:
        if stream not in self._senders:
            connection = self._connection
            sender = StreamSender(connection, stream, self._age_s) if stream else NatsSender(connection)
            self._senders[stream] = sender
            self._tasks.spawn(sender.run(), "event sender")
        return self._senders[stream]

    async def _acknowledge(self, event: Event) -> None:
        async with self._connection.call() as client:
            await client.publish(event.receipt, b"+ACK")

    async def _subscribe_live(self, pattern: str, reader: MessageReader) -> EventInbox:
        """Subscribe to the events from now on; returns when the server knows."""
        inbox = EventInbox(self._counts)
        numbers: list[int] = []

        async def take(message: Msg) -> None:
            event = reader.read(message)
            if event is not None:
                inbox.put(event)

        async def stop() -> None:
            for number in numbers:
                await self._connection.unsubscribe(number)

        try:
            for each in self._wire.patterns(pattern):
                numbers.append(await self._connection.add_subscription(each, take))
        except BaseException:
            for number in numbers:
                self._connection.unsubscribe_soon(number)
            raise
        inbox.on_close = stop
        self._inboxes.add(inbox)
        return inbox

    def _stream_of(self, pattern: str) -> tuple[str, str]:
        """Return the stream that keeps the subjects of a pattern, and the pattern as it is written there."""
        namespace, _, rest = pattern.partition(".")
        component, _, _ = rest.partition(".")
        if not rest or {namespace, component} & {"*", ">"}:
            raise ConfigError(
                f"kept events cannot be read by the pattern {pattern!r}",
                hint="Expected a namespace and a component without wildcards: each has a stream of its own.",
            )
        subject = Subject.parse(pattern)
        written = self._wire.subject(subject) if subject else self._wire.patterns(pattern)[0]
        return stream_name(namespace, component), written
