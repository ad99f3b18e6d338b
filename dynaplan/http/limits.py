"""Limits of a server's connections: their number, and the time that a client may hold one up.

A head may take so long, a client may go so long without reading, and a connection so long without a request.
Requests pay for none of this: a check of all connections, every quarter of the shortest time, finds those
that are stalled.
"""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import json
import logging
import socket
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol, cast

from dynaplan.http.timing import FIRST_REQUEST_S, HEAD_TIMEOUT_S, REFUSAL_LINGER_S
from dynaplan.util.descriptors import descriptor_limit

log = logging.getLogger(__name__)

MAX_HEADERS = 100
MAX_LINE_BYTES = 8190
"""Largest request line, and largest header, in bytes."""

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line and headers together, in bytes."""


MAX_CONNECTIONS = 8192
"""Connections that are held at most, whatever the file descriptors allow: an open stream takes 20 kB."""

RESERVED_DESCRIPTORS = 100
DESCRIPTORS_PER_CONNECTION = 2
"""A request takes the client's connection and one to a worker."""


MAX_REFUSED = 50
"""Refused connections that are open at once, to be read to their end; further ones wait in the kernel."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits that can be set. Times are in seconds; ``most`` 0 is as many as descriptors allow.

    ``option`` is the name of the option that raises ``most``, which a refusal tells the client.
    """

    most: int = 0
    idle_s: float = 75.0
    write_s: float = 60.0
    head_s: float = HEAD_TIMEOUT_S
    option: str = "Frontend.max-connections"

    @property
    def most_connections(self) -> int:
        """The number of connections that are held at most."""
        allowed = (descriptor_limit() - RESERVED_DESCRIPTORS) // DESCRIPTORS_PER_CONNECTION
        return max(1, min(allowed, self.most or MAX_CONNECTIONS))


class LimitedConnection(Protocol):
    """A client's connection, as far as its limits need it; ``LimitedConnections`` sets the first two."""

    stalled_since_s: float
    last_progress: tuple[object, ...]
    transport: asyncio.Transport | None

    @property
    def is_idle(self) -> bool:
        """True while the server waits for the first byte of this client's next request."""
        ...

    @property
    def has_asked(self) -> bool:
        """True when a request has come over it."""
        ...

    @property
    def idle_since_s(self) -> float:
        """The loop's time since which it is idle."""
        ...

    def progress(self) -> tuple[object, ...]:
        """Return what the client holds up: a reason, and values that change when the client continues.

        Empty when it holds up nothing.
        """
        ...

    def close_with(self, status: int, message: str, code: str) -> None:
        """Answer, unless an answer is under way, and close the connection."""
        ...

    def close_idle(self) -> None:
        """Close the connection, which is idle."""
        ...


class LimitedConnections:
    """The open connections of one server, each of which has to keep the limits.

    ``make`` makes the protocol of an accepted connection, which reports to ``opened`` and ``lost``;
    ``closed(reason)`` is called for each that is closed because of a limit.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        make: Callable[[socket.socket], asyncio.Protocol],
        closed: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._most = limits.most_connections
        self._make = make
        self.closed = closed
        self._loop = asyncio.get_running_loop()
        self.open: set[LimitedConnection] = set()
        self._refused: set[_Refusal] = set()
        self._refusals = 0
        self._has_any = asyncio.Event()

    def opened(self, connection: LimitedConnection) -> None:
        """Hold a connection to its limits from now on; while there is none, nothing is checked."""
        self.open.add(connection)
        self._has_any.set()

    def lost(self, connection: LimitedConnection) -> None:
        self.open.discard(connection)

    def welcome(self, accepted: socket.socket) -> asyncio.Protocol:
        """Return the protocol for an accepted connection.

        When there are too many, idle ones are closed; without any, this one is answered with 503.
        """
        if len(self.open) < self._most or self._make_room():
            return self._make(accepted)
        self._refusals += 1
        self.closed("too_many_connections")
        message = f"{self._most} connections are open, and no more may be ({self._limits.option}). Try again."
        return _Refusal(raw_error(503, message, "too_many_connections"), self._refused)

    def has_room(self) -> bool:
        """Tell whether another connection can be taken, or refused."""
        return len(self._refused) < MAX_REFUSED

    async def watch(self) -> None:
        """End the connections that stand still, until it is cancelled."""
        limits = self._limits
        every_s = min(limits.write_s, limits.head_s, limits.idle_s) / 4
        while True:
            await asyncio.sleep(every_s)
            if not self.open:
                self._report_refusals()
                self._has_any.clear()
                await self._has_any.wait()
            self._check(self._loop.time())

    def close_idle(self, idle_s: float) -> bool:
        """Close connections that have been idle for ``idle_s`` seconds; return True while
        others are idle for less."""
        idle = [each for each in self.open if each.is_idle]
        closed = [each for each in idle if each.idle_since_s <= self._loop.time() - idle_s]
        for connection in closed:
            connection.close_idle()
        return len(closed) < len(idle)

    def has_unsent_bytes(self) -> bool:
        """Tell whether a client has not taken all of its answers."""
        return any(each.transport and each.transport.get_write_buffer_size() for each in self.open)

    def close_refused(self) -> None:
        """Close the refused connections, whether their clients have read why or not."""
        for each in list(self._refused):
            each.close()

    def _check(self, now_s: float) -> None:
        self.close_idle(self._limits.idle_s)
        slow_heads = 0
        for connection in list(self._stalled(now_s)):
            reason = str(connection.last_progress[0])
            if reason == "head_timeout":
                slow_heads += 1
                message = f"The headers were not complete after {self._limits.head_s:g} s"
                connection.close_with(408, message, reason)
            else:
                self._abort(connection)
            self.closed(reason)
        if slow_heads:
            log.info("%d connections closed: their headers took too long", slow_heads)
        self._report_refusals()

    def _report_refusals(self) -> None:
        if self._refusals:
            log.error("%d connections refused: %d are open, and no more may be", self._refusals, self._most)
            self._refusals = 0

    def _stalled(self, now_s: float) -> Iterator[LimitedConnection]:
        """Yield the connections on which a client has sent no head, or taken no answer, for its timeout."""
        times_s = {"head_timeout": self._limits.head_s, "write_timeout": self._limits.write_s}
        for connection in self.open:
            progress = connection.progress()
            if progress != connection.last_progress:
                connection.last_progress, connection.stalled_since_s = progress, now_s
            elif progress and now_s - connection.stalled_since_s >= times_s[str(progress[0])]:
                yield connection

    def _abort(self, connection: LimitedConnection) -> None:
        """Close the connection of a client that does not read; its request is cancelled with it."""
        transport = connection.transport
        assert transport is not None
        log.warning(
            "the client %s has read nothing for %g s: its connection is closed with %d bytes unread",
            _address(transport),
            self._limits.write_s,
            transport.get_write_buffer_size(),
        )
        transport.abort()

    def _make_room(self) -> bool:
        """Close the connections that have been idle for longest; return False when none is idle.

        One whose first request is still on its way is not idle: its client would see a reset for an answer.
        """
        now_s = self._loop.time()
        idle = [each for each in self.open if each.is_idle and _is_given_up(each, now_s)]
        ended = heapq.nsmallest(max(1, self._most // 64), idle, key=lambda each: each.idle_since_s)
        for connection in ended:
            connection.close_idle()
            self.closed("made_room")
        return bool(ended)


def _is_given_up(connection: LimitedConnection, now_s: float) -> bool:
    """Tell whether an idle connection may be closed: no request seems to be on its way over it.

    One that has never carried a request gets FIRST_REQUEST_S seconds for the first.
    """
    if not connection.has_asked and now_s - connection.idle_since_s < FIRST_REQUEST_S:
        return False
    return connection.transport is not None and not _count_bytes(connection.transport, termios.FIONREAD)


class _Refusal(asyncio.Protocol):
    """A connection that is answered with why it is refused, and read until its client closes it.

    To close it while the client still sends would reset it, and the client might not see the answer.
    """

    def __init__(self, answer: bytes, refused: set[_Refusal]) -> None:
        self._answer = answer
        self._refused = refused
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._refused.add(self)
        self._transport = to = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        to.write(self._answer)
        if to.can_write_eof():
            to.write_eof()
        asyncio.get_running_loop().call_later(REFUSAL_LINGER_S, self.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._refused.discard(self)

    def close(self) -> None:
        if self._transport:
            self._transport.close()


def unread_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that were written and the client's kernel has not taken.

    The kernel takes more only when a third of its megabytes is free again, so that what it takes says nothing
    of a client that reads slowly.
    """
    return transport.get_write_buffer_size() + _count_bytes(transport, termios.TIOCOUTQ)


def _count_bytes(transport: asyncio.Transport, queue: int) -> int:
    """Return the bytes in a queue of the kernel: ``TIOCOUTQ`` sent, ``FIONREAD`` received."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), queue, bytes(4)), sys.byteorder)


def _address(transport: asyncio.Transport) -> str:
    peer = transport.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "whose address is unknown"


def raw_error(status: int, message: str, code: str, headers: str = "") -> bytes:
    """Return an error of OpenAI's shape as the bytes of a whole answer, after which the connection closes."""
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    retry = "Retry-After: 5\r\n" if status == 503 else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n{retry}{headers}"
    )
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
