"""Publishing the events of one subject over ZMQ: a PUB socket, and one to ask for what is kept."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress

import zmq

from dynaplan.events.envelope import Envelope, frames_of
from dynaplan.events.event_channels import EventChannel
from dynaplan.events.inbox import EventCounts
from dynaplan.events.publishing import new_publisher_id, unix_ms
from dynaplan.events.replay import ReplayBuffer
from dynaplan.events.replay_requests import answers
from dynaplan.events.zmq_sockets import IPC, EventSockets, SocketReader
from dynaplan.util.errors import PermanentError

log = logging.getLogger(__name__)

MOST_BYTES = 8 * 2**20
REOPEN_S = 1.0

Named = Callable[[int, str, str], EventChannel]


class ZmqPublisher:
    """A ``dynaplan.events.port.EventPublisher``; its sockets are opened with the first event.

    ``named(publisher, address, replay)`` makes the channel, which ``announce`` tells the others of.
    """

    def __init__(
        self,
        sockets: EventSockets,
        topic: str,
        named: Named,
        announce: Callable[[EventChannel], None],
        counts: EventCounts,
        buffer: ReplayBuffer,
    ) -> None:
        self._sockets = sockets
        self._topic = topic
        self._named = named
        self._announce = announce
        self._counts = counts
        self._buffer = buffer
        self._publisher = new_publisher_id()
        self._next = 0
        self._events: zmq.Socket[bytes] | None = None
        self._replays: SocketReader | None = None
        self._addresses: tuple[str, ...] = ()
        self._retry_at_s = 0.0

    async def publish(self, payload: bytes) -> int:
        """Send the event to the present subscribers, and keep it for later ones; return its number."""
        if len(payload) > MOST_BYTES:
            raise PermanentError(f"an event of {len(payload)} bytes is too large: {self._topic}")
        sequence, self._next = self._next, self._next + 1
        event = Envelope(self._publisher, sequence, unix_ms(), self._topic, payload)
        self._buffer.append(event)
        self._counts.published += 1
        if self._is_open() and self._events is not None:
            self._events.send_multipart(frames_of(event), zmq.NOBLOCK)
        return sequence

    def restore(self) -> None:
        """Open the sockets anew when their files are gone: nobody could find them any more."""
        paths = [each.removeprefix(IPC) for each in self._addresses if each.startswith(IPC)]
        if not all(map(os.path.exists, paths)):
            log.warning("the sockets for events of %s had vanished: opening them anew", self._topic)
            self.close()
            self._is_open()

    def close(self) -> None:
        """Close the sockets, and remove their files."""
        if self._events is not None:
            self._events.close(linger=0)
            self._events = None
        if self._replays is not None:
            self._replays.close()
            self._replays = None
        for address in self._addresses:
            if address.startswith(IPC):
                with suppress(FileNotFoundError):  # libzmq leaves the file.
                    os.unlink(address.removeprefix(IPC))
        self._addresses = ()

    def _is_open(self) -> bool:
        """Tell whether there are sockets, which are opened when there are none."""
        if self._events is not None:
            return True
        now_s = asyncio.get_running_loop().time()
        if now_s < self._retry_at_s:
            return False
        try:
            self._open()
        except OSError as error:  # zmq.ZMQError is one
            self._retry_at_s = now_s + REOPEN_S
            log.warning("no socket for events of %s: %s", self._topic, error)
            return False
        return True

    def _open(self) -> None:
        self._events, address = self._sockets.bound(zmq.PUB, f"{self._publisher:x}.events")
        socket, replay = self._sockets.bound(zmq.ROUTER, f"{self._publisher:x}.replay")
        self._replays = SocketReader(socket, lambda frames: self._answer(socket, frames))
        self._addresses = address, replay
        self._announce(self._named(self._publisher, address, replay))

    def _answer(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        """Answer a subscriber that asks for events; no other request is answered."""
        identity, *rest = frames
        if len(rest) != 2:
            return
        self._buffer.expire(unix_ms())
        try:
            for message in answers(rest[1], self._buffer, self._publisher):
                socket.send_multipart([identity, b"", *message], zmq.NOBLOCK)
        except (ValueError, zmq.ZMQError) as error:
            log.debug("a request for events of %s is not answered: %s", self._topic, error)
