"""The event plane in one process, in place of ``NatsEventPlane``."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from weakref import WeakSet

from dynaplan.events.nats_publisher import Outbox, OutboxPublisher, Outgoing, unix_ms
from dynaplan.events.nats_subscriber import EventInbox
from dynaplan.events.port import EventPublisher, EventSubscription
from dynaplan.events.subjects import NOW, Event, EventCounts, Start, Subject, matches
from dynaplan.events.wire_formats import PlainFormat, parse_message_id
from dynaplan.util.errors import ConfigError, QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks

EVENT_ACK_WAIT_S = 30.0
MOST_BYTES = 8 * 2**20 - 512
"""Bytes of the largest payload, as of the embedded NATS server."""


@dataclass(eq=False)
class _Broker:
    """The state that the planes of one "server" share."""

    ack_wait_s: float
    is_available: bool = True
    outages: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    kept: list[tuple[int, Event]] = field(default_factory=list)
    inboxes: list[tuple[str, EventInbox]] = field(default_factory=list)
    groups: dict[tuple[str, str], _Group] = field(default_factory=dict)

    def take(self, message: Outgoing, is_kept: bool) -> None:
        publisher, sequence = parse_message_id(message.message_id)
        event = Event(message.subject, message.data, publisher, sequence)
        if is_kept:
            event = replace(event, position=len(self.kept) + 1)
            self.kept.append((unix_ms(), event))
        for pattern, inbox in self.inboxes:
            if matches(pattern, event.subject):
                inbox.put(event)
        for (pattern, _), group in self.groups.items():
            if is_kept and matches(pattern, event.subject):
                group.offer(event)

    def since(self, pattern: str, start: Start) -> list[Event]:
        return [
            event
            for published_ms, event in self.kept
            if matches(pattern, event.subject)
            and not start.is_now
            and event.position >= (start.position or 0)
            and published_ms >= (start.unix_s or 0) * 1000
        ]


class MemoryEventPlane:
    """The twin of ``NatsEventPlane``: what is kept, replayed, grouped and dropped is as there.

    ``peer()`` is another connection to the same "server". Setting ``is_available`` to False, on any of them,
    makes publishers wait and ``subscribe`` raise QueueUnavailable, as when the server is away.
    """

    def __init__(self, *, ack_wait_s: float = EVENT_ACK_WAIT_S) -> None:
        self._broker = _Broker(ack_wait_s)
        self._counts = EventCounts()
        self._tasks = BackgroundTasks()
        self._boxes: dict[bool, Outbox] = {}
        self._own: WeakSet[EventSubscription] = WeakSet()

    def peer(self) -> MemoryEventPlane:
        """Another connection to the same server."""
        peer = MemoryEventPlane()
        peer._broker = self._broker
        return peer

    @property
    def is_available(self) -> bool:
        """False while a test has the broker switched off; calls then raise QueueUnavailable."""
        return self._broker.is_available

    @is_available.setter
    def is_available(self, value: bool) -> None:
        self._broker.outages += self._broker.is_available and not value
        self._broker.is_available = value
        self._broker.changed.set()

    def publisher(self, subject: Subject, *, is_kept: bool) -> EventPublisher:
        """Return a publisher of the subject; those of kept events share one outbox, the others another."""
        if is_kept not in self._boxes:
            self._boxes[is_kept] = Outbox()
            self._tasks.spawn(self._send(self._boxes[is_kept], is_kept), "event sender")
        outbox = self._boxes[is_kept]
        return OutboxPublisher(subject, PlainFormat(), outbox, self._counts, lambda: MOST_BYTES)

    async def subscribe(self, pattern: str, start: Start = NOW, group: str = "") -> EventSubscription:
        """Subscribe to what matches; raises QueueUnavailable, and ConfigError for a pattern."""
        if not self.is_available:
            raise QueueUnavailable("the event plane in memory is switched off")
        if not (start.is_now and not group) and {"*", ">"} & set(pattern.split(".")[:2]):
            raise ConfigError(
                f"kept events cannot be read by the pattern {pattern!r}",
                hint="Expected a namespace and a component without wildcards.",
            )
        broker = self._broker
        if group:
            return self._join(pattern, start, group)
        inbox = EventInbox(self._counts)
        self._own.add(inbox)
        for event in broker.since(pattern, start):
            inbox.put(event)
        entry = pattern, inbox
        broker.inboxes.append(entry)

        async def stop() -> None:
            broker.inboxes.remove(entry)

        inbox.on_close = stop
        return inbox

    def _join(self, pattern: str, start: Start, group: str) -> EventInbox:
        """Return a new member of the group, which is made when nobody has joined it before."""
        broker = self._broker
        known = broker.groups.get((pattern, group))
        if known is None:
            known = broker.groups[pattern, group] = _Group(broker.ack_wait_s)
            for event in broker.since(pattern, start):
                known.offer(event)
        inbox = EventInbox(self._counts, known.done)
        self._own.add(inbox)
        filling = self._tasks.spawn(known.fill(inbox), "event group")

        async def stop() -> None:
            filling.cancel()

        inbox.on_close = stop
        return inbox

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the server has everything."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(self._boxes.values()):
                    await asyncio.sleep(0.001)
        except TimeoutError:
            return False
        return True

    def continuity(self) -> int | None:
        """Return the number of outages so far; None in one."""
        return self._broker.outages if self.is_available else None

    def counts(self) -> Mapping[str, int]:
        """Count what this plane has published, dropped and received, and what waits in its outboxes."""
        boxes = self._boxes.values()
        dropped, waiting = sum(box.dropped for box in boxes), sum(map(len, boxes))
        return {**vars(self._counts), "dropped": dropped, "waiting": waiting}

    async def close(self) -> None:
        """Send what waits, and nothing more; end every subscription."""
        if self.is_available:
            await self.flush(1.0)
        for inbox in list(self._own):
            await inbox.close()
        await self._tasks.cancel()

    async def _send(self, outbox: Outbox, is_kept: bool) -> None:
        while True:
            while outbox and self.is_available:
                self._broker.take(outbox.pop(), is_kept)
            outbox.filled.clear()
            self._broker.changed.clear()
            waits = [asyncio.ensure_future(each.wait()) for each in (outbox.filled, self._broker.changed)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()


class _Group:
    """The events that a group has not acknowledged."""

    def __init__(self, ack_wait_s: float) -> None:
        self._ack_wait_s = ack_wait_s
        self._offered: deque[Event] = deque()
        self._open: set[str] = set()
        self._filled = asyncio.Event()

    def offer(self, event: Event) -> None:
        self._offered.append(replace(event, receipt=f"{event.position}"))
        self._filled.set()

    async def fill(self, inbox: EventInbox) -> None:
        """Give a member what it waits for, until cancelled."""
        while await inbox.room():
            while not self._offered:
                self._filled.clear()
                await self._filled.wait()
            if not inbox.is_awaited:
                continue
            event = self._offered.popleft()
            self._open.add(event.receipt)
            asyncio.get_running_loop().call_later(self._ack_wait_s, self._again, event)
            inbox.put(event)

    async def done(self, event: Event) -> None:
        self._open.discard(event.receipt)

    def _again(self, event: Event) -> None:
        if event.receipt in self._open:
            self._open.discard(event.receipt)
            self.offer(event)
