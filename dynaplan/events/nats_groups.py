"""Groups of subscribers: each kept event goes to one member, and to another unless it is acknowledged."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from dynaplan.events.inbox import EventCounts
from dynaplan.events.messaging.pulling import PullRequests
from dynaplan.events.nats_reading import MessageReader, beginning, placed
from dynaplan.events.nats_stream import find_stream
from dynaplan.events.subjects import Event, Start
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import PermanentError, QueueUnavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from dynaplan.store.nats_connection import NatsMessenger

ACK_WAIT_S = 30.0
"""Time after which an event that was not acknowledged goes to a member again."""

PULL_S = 5.0
RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 1.0


class GroupSubscription:
    """A ``dynaplan.events.port.EventSubscription`` of one member of a group; made by ``opened``."""

    def __init__(
        self,
        messenger: NatsMessenger,
        stream: str,
        pattern: str,
        age_s: float,
        group: str,
        reader: MessageReader,
        counts: EventCounts,
        ack_wait_s: float = ACK_WAIT_S,
    ) -> None:
        self._messenger = messenger
        self._stream = stream
        self._pattern = pattern
        self._age_s = age_s
        self._consumer = re.sub(r"[^A-Za-z0-9_-]", "_", group)
        self._reader = reader
        self._counts = counts
        self._ack_wait_s = ack_wait_s
        self._start = Start(position=0)
        self._pulls = PullRequests(messenger, stream, self._consumer)
        self._closed = asyncio.Event()

    async def open(self, start: Start) -> None:
        """Join the group, which begins at ``start`` when nobody has joined it before."""
        self._start = start
        await self._ensure()
        await self._pulls.open()
        # A group that has to be made anew has lost its place: it begins with all that is kept.
        self._start = Start(position=0)

    def __aiter__(self) -> GroupSubscription:
        """Return itself."""
        return self

    async def __anext__(self) -> Event:
        """Return the next event for this member; waits through outages."""
        closed = asyncio.ensure_future(self._closed.wait())
        pulled = asyncio.ensure_future(self._pulled())
        try:
            await asyncio.wait({closed, pulled}, return_when=asyncio.FIRST_COMPLETED)
            if not pulled.done():
                raise StopAsyncIteration
            return pulled.result()
        finally:
            closed.cancel()
            pulled.cancel()

    async def ack(self, event: Event) -> None:
        """Tell the server that the event is done; raises QueueUnavailable when it is away."""
        if not event.receipt:
            raise PermanentError("this event is of no group: it needs no acknowledgement")
        async with self._messenger.call() as client:
            await client.publish(event.receipt, b"+ACK")

    async def close(self) -> None:
        """Leave the group: its other members get what comes, and what was not acknowledged."""
        if not self._closed.is_set():
            self._closed.set()
            await self._pulls.close()

    async def _pulled(self) -> Event:
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        while True:
            try:
                message = await self._pulls.pull(PULL_S)
                if message is None:
                    continue
                if message.reply:
                    event = await self._read(message)
                    if event is not None:
                        return event
                else:  # A status: stream or consumer are gone, or the server is about to go.
                    await self._ensure()
            except QueueUnavailable:
                await backoff.pause()

    async def _read(self, message: Msg) -> Event | None:
        """The message's event; what cannot be read is acknowledged, so that it does not come again."""
        event = self._reader.read(message)
        if event is None:
            self._messenger.tell(message.reply, b"+ACK")
            return None
        self._counts.received += 1
        return placed(event, message.metadata.sequence.stream, message.reply)

    async def _ensure(self) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig

        await find_stream(self._messenger, self._stream, self._pattern, self._age_s)
        config = ConsumerConfig(
            durable_name=self._consumer,
            filter_subject=self._pattern,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_s,
            inactive_threshold=self._age_s,
            **beginning(self._start, self._start.position),
        )
        async with self._messenger.call() as client:
            from nats.js.errors import NotFoundError

            manager = client.jsm()
            try:
                await manager.consumer_info(self._stream, self._consumer)
            except NotFoundError:
                await manager.add_consumer(self._stream, config)
