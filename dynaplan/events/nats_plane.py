"""The event plane on a NATS server: JetStream keeps what is to be kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING
from weakref import WeakSet

from dynaplan.config.settings.servers import MAX_AGE_S, max_age_s
from dynaplan.events.inbox import EventCounts, EventInbox
from dynaplan.events.nats_groups import ACK_WAIT_S, GroupSubscription
from dynaplan.events.nats_reading import MessageReader, StreamReader
from dynaplan.events.nats_sending import NatsSender, StreamSender
from dynaplan.events.nats_stream import stream_name
from dynaplan.events.port import EventPublisher, EventSubscription
from dynaplan.events.publishing import BoxedPublisher
from dynaplan.events.subjects import NOW, Start, Subject
from dynaplan.events.wires import EventWire, SeedWire
from dynaplan.store.nats_connection import FOR_EVER, NatsMessenger
from dynaplan.util.errors import ConfigError
from dynaplan.util.tasks import BackgroundTasks

if TYPE_CHECKING:
    from nats.aio.msg import Msg

CLOSE_S = 1.0
HEAD_BYTES = 512
"""Room in a message for what its wire form adds to the payload."""


class NatsEventPlane:
    """``dynaplan.events.port.EventPlane`` on NATS; made by ``from_environment``."""

    def __init__(
        self,
        messenger: NatsMessenger,
        wire: EventWire,
        age_s: float = MAX_AGE_S,
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        self._messenger = messenger
        self._wire = wire
        self._age_s = age_s
        self._ack_wait_s = ack_wait_s
        self._counts = EventCounts()
        self._tasks = BackgroundTasks()
        self._senders: dict[str, NatsSender] = {}
        self._inboxes: WeakSet[EventSubscription] = WeakSet()
        self._connects = 0
        messenger.on_reconnect(self._connected_again)

    @classmethod
    async def from_environment(
        cls,
        environ: Mapping[str, str],
        wire: EventWire | None = None,
        max_reconnects: int = FOR_EVER,
        ack_wait_s: float = ACK_WAIT_S,
    ) -> NatsEventPlane:
        """Connected as ``NatsMessenger.from_environment`` does; raises what that raises, and ConfigError."""
        age_s = max_age_s(environ)
        messenger = await NatsMessenger.from_environment(environ, max_reconnects)
        return cls(messenger, wire or SeedWire(), age_s, ack_wait_s)

    @property
    def is_connected(self) -> bool:
        """True while there is a connection, as far as is known."""
        return self._messenger.is_connected

    def publisher(self, subject: Subject, *, is_kept: bool) -> EventPublisher:
        """Return a publisher; kept events go to the component's stream."""
        sender = self._sender(stream_name(subject.namespace, subject.component) if is_kept else "")
        return BoxedPublisher(
            subject,
            self._wire,
            sender.outbox,
            sender.filled,
            self._counts,
            lambda: self._messenger.most_bytes - HEAD_BYTES,
        )

    async def subscribe(self, pattern: str, start: Start = NOW, group: str = "") -> EventSubscription:
        """Subscribe; for a group or from an earlier event on, to the events that are kept."""
        reader = MessageReader(self._wire, self._counts)
        if start.is_now and not group:
            return await self._listening(pattern, reader)
        stream, subject = self._stream_of(pattern)
        if group:
            member = GroupSubscription(
                self._messenger,
                stream,
                subject,
                self._age_s,
                group,
                reader,
                self._counts,
                self._ack_wait_s,
            )
            await member.open(start)
            self._inboxes.add(member)
            return member
        inbox = EventInbox(self._counts)
        self._inboxes.add(inbox)
        source = StreamReader(self._messenger, stream, subject, self._age_s, start)
        reading = self._tasks.spawn(source.run(inbox, reader), "event stream")

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
            await self.flush(CLOSE_S)
        for inbox in list(self._inboxes):
            await inbox.close()
        await self._tasks.cancel()
        await self._messenger.close()

    def _connected_again(self) -> None:
        self._connects += 1

    def _sender(self, stream: str) -> NatsSender:
        if stream not in self._senders:
            sender = (
                StreamSender(self._messenger, stream, self._age_s) if stream else NatsSender(self._messenger)
            )
            self._senders[stream] = sender
            self._tasks.spawn(sender.run(), "event sender")
        return self._senders[stream]

    async def _listening(self, pattern: str, reader: MessageReader) -> EventInbox:
        """Subscribe to the events from now on; returns when the server knows."""
        inbox = EventInbox(self._counts)
        numbers: list[int] = []

        async def take(message: Msg) -> None:
            event = reader.read(message)
            if event is not None:
                inbox.put(event)

        async def stop() -> None:
            for number in numbers:
                await self._messenger.unlisten(number)

        for each in self._wire.patterns(pattern):
            numbers.append(await self._messenger.listen(each, take))
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
