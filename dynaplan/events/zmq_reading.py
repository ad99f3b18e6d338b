"""Reading one publisher's channel over ZMQ: what comes live, and asked for again what did not come."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq

from dynaplan.events.envelope import Envelope, read_frames
from dynaplan.events.event_channels import EventChannel
from dynaplan.events.replay import ChannelFollower
from dynaplan.events.replay_requests import read_end, request_bytes
from dynaplan.events.subjects import Event, Start
from dynaplan.events.wires import event_of
from dynaplan.events.zmq_sockets import EventSockets, SocketReader

log = logging.getLogger(__name__)

ASK_FIRST_S = 0.02
ASK_LONGEST_S = 5.0
ANSWER_S = 1.0


class ChannelReader:
    """Calls ``deliver(event)`` with the events of one channel, in order.

    Every now and then it asks the publisher for what it does not have: at first often, since a new
    subscription takes effect a moment later, then every five seconds, and at once when an event is missing.
    """

    def __init__(
        self,
        sockets: EventSockets,
        channel: EventChannel,
        start: Start,
        deliver: Callable[[Event], None],
        is_open: bool,
    ) -> None:
        self._channel = channel
        self._subject = f"{channel.namespace}.{channel.component}.{event_of(channel.topic)}"
        self._deliver = deliver
        has_replay = bool(channel.replay)
        first = max(0, start.position - 1) if has_replay and start.position is not None else None
        self._follower: ChannelFollower[Envelope] = ChannelFollower(
            self._take, first, awaits_replay=has_replay
        )
        self._since_ms = None if start.unix_s is None else int(start.unix_s * 1000)
        self._going = asyncio.Event()
        self._going.set()
        self._wake = asyncio.Event()
        self._answered = asyncio.Event()
        self._has_more = False
        self._asking: SocketReader | None = None
        self._faults: set[str] = set()
        self.unreadable = 0
        events = sockets.connected(zmq.SUB, channel.address, is_open=is_open)
        events.subscribe(channel.topic.encode())
        self._events = SocketReader(events, self._on_event)
        if channel.replay:
            self._socket = sockets.connected(zmq.DEALER, channel.replay, is_open=is_open)
            self._asking = SocketReader(self._socket, self._on_answer)

    @property
    def channel(self) -> EventChannel:
        """The publisher's announcement, with the addresses that are read."""
        return self._channel

    @property
    def next_position(self) -> int | None:
        """The position of the next event; None when none is known yet."""
        return None if self._follower.next is None else self._follower.next + 1

    def pause(self) -> None:
        """Take no event off the socket; ZMQ keeps what comes, up to its limit."""
        self._events.pause()
        self._going.clear()

    def resume(self) -> None:
        """Take events off the socket again, those first that came meanwhile."""
        self._events.resume()
        self._going.set()

    async def run(self) -> None:
        """Ask for what is missing, for ever; returns at once where that is not possible."""
        if self._asking is None:
            return
        pause_s = ASK_FIRST_S
        while True:
            await self._going.wait()
            if not (await self._ask() and self._has_more):
                pause_s = min(2 * pause_s, ASK_LONGEST_S)
                await self._pause(pause_s)

    def close(self) -> None:
        """Close both sockets: that of events and, where there is one, that of what was missed."""
        self._events.close()
        if self._asking is not None:
            self._asking.close()

    async def _ask(self) -> bool:
        """Ask for the next events; tell whether an answer came in time."""
        self._wake.clear()
        self._answered.clear()
        wanted = self._follower.next
        request = request_bytes(wanted, self._since_ms if wanted is None else None)
        try:
            self._socket.send_multipart([b"", request], zmq.NOBLOCK)
            if self._asking is not None:
                self._asking.look()
            async with asyncio.timeout(ANSWER_S):
                await self._answered.wait()
        except (TimeoutError, zmq.Again):
            return False
        return True

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _on_event(self, frames: list[bytes]) -> None:
        event = self._read(frames)
        if event is not None:
            self._follower.live(event.sequence, event)
            if self._follower.has_gap:
                self._wake.set()

    def _on_answer(self, frames: list[bytes]) -> None:
        end = read_end(frames[1:])
        if end is not None:
            until, following = end
            self._follower.replayed_until(until)
            self._has_more = until < following
            self._answered.set()
            return
        event = self._read(frames[1:])
        if event is not None:
            self._follower.replayed(event.sequence, event)

    def _read(self, frames: list[bytes]) -> Envelope | None:
        """Return the message's event; None for what is none, each fault of which is named once."""
        try:
            event = read_frames(frames)
            if event.publisher_id == self._channel.publisher:
                return event
            fault = "it is of another publisher"
        except ValueError as error:
            fault = str(error)
        self.unreadable += 1
        if fault not in self._faults and len(self._faults) < 100:
            self._faults.add(fault)
            log.warning("skipping what is no event on %s: %s", self._subject, fault)
        return None

    def _take(self, event: Envelope) -> None:
        position = event.sequence + 1 if self._channel.replay else 0
        self._deliver(Event(self._subject, event.payload, event.publisher_id, event.sequence, position))
