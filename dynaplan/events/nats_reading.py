"""Reading the events that a stream keeps: from a position or a time on, without a gap, through outages."""

from __future__ import annotations

import asyncio
import logging
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dynaplan.events.inbox import EventCounts, EventInbox
from dynaplan.events.nats_stream import find_stream
from dynaplan.events.subjects import Event, Start
from dynaplan.events.wires import MESSAGE_ID, EventWire
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg
    from nats.js.api import ConsumerConfig

    from dynaplan.store.nats_connection import NatsMessenger

log = logging.getLogger(__name__)

RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 1.0
HEARTBEAT_S = 2.0
SILENCE_S = 2.5 * HEARTBEAT_S
"""A consumer that says nothing for this time is gone: the server's heartbeat has not come twice."""

_FLOW = "FlowControl Request"


class MessageReader:
    """Reads messages as events; names each fault of a subject once, and skips what cannot be read."""

    def __init__(self, wire: EventWire, counts: EventCounts) -> None:
        self._wire = wire
        self._counts = counts
        self._named: set[tuple[str, str]] = set()

    def read(self, message: Msg) -> Event | None:
        """Return the message's event; None for what is none."""
        message_id = (message.headers or {}).get(MESSAGE_ID, "")
        try:
            return self._wire.event(message.subject, message.data, message_id)
        except ValueError as error:
            self._counts.unreadable += 1
            fault = message.subject, str(error)
            if fault not in self._named and len(self._named) < 1000:
                self._named.add(fault)
                log.warning("skipping what is no event on %s: %s", *fault)
            return None


class StreamReader:
    """Fills an inbox with the kept events of one subject or pattern of a component.

    The server pushes them; when anything is amiss, the rest is asked for anew from the next position on.
    """

    def __init__(
        self, messenger: NatsMessenger, stream: str, pattern: str, age_s: float, start: Start
    ) -> None:
        self._messenger = messenger
        self._stream = stream
        self._pattern = pattern
        self._age_s = age_s
        self._start = start
        self._next = start.position
        self._created = ""
        self._consumer = ""
        self._delivered = 0
        self._heard = asyncio.Event()
        self._fault = ""
        self._flow = ""

    async def run(self, inbox: EventInbox, reader: MessageReader) -> None:
        """Fill the inbox until cancelled; after an outage go on behind the last message read."""
        self._inbox, self._reader = inbox, reader
        inbox.on_room = self._go_on
        forget = self._messenger.on_reconnect(self._on_reconnect)
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        try:
            while True:
                try:
                    await self._consume(backoff)
                except QueueUnavailable as error:
                    if backoff.is_first:
                        log.info("reading %s again: %s", self._pattern, error)
                    await backoff.pause()
        finally:
            forget()

    async def _consume(self, backoff: Backoff) -> None:
        """Make a consumer, and take what it delivers until something is amiss: raises QueueUnavailable."""
        self._fault, self._consumer, self._delivered, self._flow = "", secrets.token_hex(8), 0, ""
        async with self._messenger.call() as client:
            address = client.new_inbox()
        number = await self._messenger.listen(address, self._on_message)
        try:
            await self._find_stream()
            async with self._messenger.call() as client:
                config = self._config(address)
                await client.jsm().add_consumer(self._stream, config)
            while not self._fault:
                self._heard.clear()
                async with asyncio.timeout(SILENCE_S):
                    await self._heard.wait()
                backoff.reset()
            raise QueueUnavailable(self._fault)
        except TimeoutError as error:
            raise QueueUnavailable("the stream is silent") from error
        finally:
            await self._messenger.unlisten(number)

    async def _find_stream(self) -> None:
        """Look whether the stream is the one that was read before; another one is read from its beginning."""
        found = await find_stream(self._messenger, self._stream, self._pattern, self._age_s)
        created = str(found.created)
        if self._created and self._created != created:
            log.warning("the stream %s was made anew: reading it from its beginning", self._stream)
            self._next = 0
        self._created = created

    def _config(self, address: str) -> ConsumerConfig:
        from nats.js.api import AckPolicy, ConsumerConfig

        return ConsumerConfig(
            name=self._consumer,
            deliver_subject=address,
            filter_subject=self._pattern,
            ack_policy=AckPolicy.NONE,
            max_deliver=1,
            flow_control=True,
            idle_heartbeat=HEARTBEAT_S,
            inactive_threshold=SILENCE_S,
            mem_storage=True,
            num_replicas=1,
            **beginning(self._start, self._next),
        )

    async def _on_message(self, message: Msg) -> None:
        if message.headers and message.headers.get("Status"):
            self._on_status(message)
            return
        parts = message.reply.split(".")
        consumer, position, delivered = (parts[at] for at in (-6, -4, -3))
        if consumer != self._consumer or self._fault:
            return
        self._delivered += 1
        if int(delivered) != self._delivered:
            self._amiss("an event did not arrive")
            return
        self._next = int(position) + 1
        event = self._reader.read(message)
        if event is not None:
            self._inbox.put(placed(event, int(position)))
        self._heard.set()

    def _on_status(self, message: Msg) -> None:
        """Answer a request of flow control, unless the subscriber is behind; notice what did not arrive."""
        headers = message.headers or {}
        self._heard.set()
        if headers.get("Description") == _FLOW:
            self._flow = message.reply
        else:
            self._flow = headers.get("Nats-Consumer-Stalled", self._flow)
            last = headers.get("Nats-Last-Consumer")
            if last is not None and int(last) > self._delivered:
                self._amiss("an event did not arrive")
        if not self._inbox.stops():
            self._go_on()

    def _go_on(self) -> None:
        """Let the server send more."""
        flow, self._flow = self._flow, ""
        if flow:
            self._messenger.tell(flow)

    def _on_reconnect(self) -> None:
        self._amiss("the connection was lost")

    def _amiss(self, why: str) -> None:
        self._fault = self._fault or why
        self._heard.set()


def placed(event: Event, position: int, receipt: str = "") -> Event:
    """Return the event with its position in a stream."""
    return Event(event.subject, event.payload, event.publisher, event.sequence, position, 0, receipt)


def beginning(start: Start, position: int | None) -> dict[str, Any]:
    """Return the fields of a consumer that begins at the position, or else as ``start`` says."""
    from nats.js.api import DeliverPolicy

    if position is None and start.unix_s is not None:
        time = datetime.fromtimestamp(start.unix_s, UTC).isoformat()
        return {"deliver_policy": DeliverPolicy.BY_START_TIME, "opt_start_time": time}
    if position is None:
        return {"deliver_policy": DeliverPolicy.NEW}
    if position < 1:
        return {"deliver_policy": DeliverPolicy.ALL}
    return {"deliver_policy": DeliverPolicy.BY_START_SEQUENCE, "opt_start_seq": position}
