"""The limits of one client's connection: its head's size and time, its silence, and its reading.

aiohttp answers a head with a line or a field that is too long, and closes idle connections. It does not bound
the size of a head, nor the time that one takes, and it waits for ever for a client that does not read.
Requests pay for none of this: a look at all connections every second finds what stands still.
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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from dynaplan.util.descriptors import descriptor_limit

log = logging.getLogger(__name__)

MOST_HEADERS = 100
LARGEST_LINE_BYTES = 8190
"""Largest request line, and largest header, in bytes; aiohttp's own default."""

LARGEST_HEAD_BYTES = 64 * 1024
"""Largest request line and headers together, in bytes."""

HEAD_WITHIN_S = 30.0
"""Time that a client may take to send a request's line and headers, once it has begun."""

LOOK_EVERY_S = 1.0
"""Longest time between two looks at the connections."""

MOST_CONNECTIONS = 8192
"""Connections that are held at most when the file descriptors would allow more: each takes about 30 kB."""

DESCRIPTORS_KEPT_FREE = 100
DESCRIPTORS_PER_CONNECTION = 2
"""A request takes the client's connection and one to a worker."""

LINGER_S = 1.0
"""Time for which a refused connection stays open, so that its client can read the refusal."""

MOST_LINGERING = 100
"""Refused connections that stay open at once; further ones are closed without waiting."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits that can be set. Times are in seconds; ``most`` 0 is as many as descriptors allow.

    ``option`` raises ``most``: it is named in a refusal.
    """

    most: int = 0
    idle_s: float = 75.0
    write_s: float = 60.0
    head_s: float = HEAD_WITHIN_S
    option: str = "Frontend.max-connections"

    @property
    def most_connections(self) -> int:
        """The number of connections that are held at most."""
        allowed = (descriptor_limit() - DESCRIPTORS_KEPT_FREE) // DESCRIPTORS_PER_CONNECTION
        return max(1, min(allowed, self.most or MOST_CONNECTIONS))


class ClientConnection(web.RequestHandler):
    """aiohttp's protocol, which counts the bytes of a head that is not complete."""

    head_bytes = 0
    stands_since_s = 0.0
    seen: tuple[object, ...] = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that has grown too large is answered 431, and the connection closed."""
        is_head = self.is_idle or self._is_answering_whole()
        super().data_received(data)
        if is_head:
            self.head_bytes = 0 if self._messages else self.head_bytes + len(data)
            if self.head_bytes > LARGEST_HEAD_BYTES and isinstance(self._manager, ClientServer):
                self._manager.closed("head_too_large")
                self.end_with(
                    431, f"The headers are larger than {LARGEST_HEAD_BYTES} bytes", "head_too_large"
                )

    @property
    def is_idle(self) -> bool:
        """True while the server waits for this client's next request."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def idle_until_s(self) -> float:
        """The loop's time at which the connection will have been idle for too long."""
        return self._next_keepalive_close_time

    def _is_answering_whole(self) -> bool:
        """Tell whether the request that is being answered has come whole: what follows is another head."""
        request = self._current_request
        return request is not None and not self._messages and request.content.is_eof()

    def progress(self) -> tuple[object, ...]:
        """Return what the client holds up; it changes when the client goes on, and is empty for nothing."""
        if self.transport is None:
            return ()
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes:
            request = self._current_request
            written = request.writer.output_size if request is not None else 0
            unread_bytes = unsent_bytes + _unacknowledged_bytes(self.transport)
            return ("write_timeout", id(request), written - unread_bytes)
        return ("head_timeout", self._request_count) if self.head_bytes else ()

    def end_with(self, status: int, message: str, code: str) -> None:
        """Answer, unless an answer is under way, and close the connection."""
        if self.transport is not None and self._current_request is None:
            self.transport.write(raw_answer(status, message, code))
        self.force_close()


def _unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Return the bytes that the kernel has taken and the client's has not.

    The kernel takes more only when a third of its megabytes is free again, so that what it takes says nothing
    of a client that reads slowly.
    """
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:
        return 0
    return int.from_bytes(fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def _address(connection: ClientConnection) -> str:
    peer = connection.peername
    return f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else "whose address is unknown"


def raw_answer(status: int, message: str, code: str) -> bytes:
    """Return an error of OpenAI's shape as the bytes of a whole answer, after which the connection closes."""
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    retry = "Retry-After: 5\r\n" if status == 503 else ""
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n{retry}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class ClientServer(web.Server):
    """aiohttp's server for clients that nobody knows: it holds every connection to its limits.

    ``closed(reason)`` is called for each connection that is closed over a limit.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Any],
        limits: ConnectionLimits,
        closed: Callable[[str], None],
        **options: Any,
    ) -> None:
        super().__init__(
            handler,
            keepalive_timeout=limits.idle_s,
            max_line_size=LARGEST_LINE_BYTES,
            max_field_size=LARGEST_LINE_BYTES,
            max_headers=MOST_HEADERS,
            **options,
        )
        self._limits = limits
        self._most = limits.most_connections
        self.closed = closed
        self._refused = 0
        self._lingering: set[socket.socket] = set()
        self._has_any = asyncio.Event()

    def __call__(self) -> ClientConnection:
        """Make the protocol of a connection."""
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Note a connection; while there is none, nothing is looked at."""
        super().connection_made(handler, transport)
        self._has_any.set()

    def welcome(self, connection: socket.socket) -> ClientConnection | None:
        """Take an accepted connection; when there are too many, idle ones go, or this one is refused."""
        if len(self._connections) < self._most or self._idle_ended():
            return self()
        self._refuse(connection)
        return None

    async def watch(self) -> None:
        """End the connections that stand still, until it is cancelled."""
        limits = self._limits
        every_s = min(LOOK_EVERY_S, limits.write_s / 4, limits.head_s / 4)
        while True:
            await asyncio.sleep(every_s)
            if not self._connections:
                self._has_any.clear()
                await self._has_any.wait()
            self._look(self._loop.time())

    def _look(self, now_s: float) -> None:
        slow_heads = 0
        for connection in self._standing(now_s):
            if connection.seen[0] == "head_timeout":
                slow_heads += 1
                message = f"The headers were not complete after {self._limits.head_s:g} s"
                connection.end_with(408, message, "head_timeout")
            else:
                self._abort(connection)
            self.closed(str(connection.seen[0]))
        if slow_heads:
            log.info("%d connections closed: their headers took too long", slow_heads)
        if self._refused:
            log.error("%d connections refused: %d are open, and no more may be", self._refused, self._most)
            self._refused = 0

    def _standing(self, now_s: float) -> Iterator[ClientConnection]:
        """Yield the connections whose client has not gone on for its time."""
        times_s = {"head_timeout": self._limits.head_s, "write_timeout": self._limits.write_s}
        for connection in self.connections:
            assert isinstance(connection, ClientConnection)
            progress = connection.progress()
            if progress != connection.seen:
                connection.seen, connection.stands_since_s = progress, now_s
            elif progress and now_s - connection.stands_since_s >= times_s[str(progress[0])]:
                yield connection

    def _abort(self, connection: ClientConnection) -> None:
        """Close the connection of a client that does not read; its request is cancelled with it."""
        transport = connection.transport
        assert transport is not None
        log.warning(
            "the client %s has read nothing for %g s: its connection is closed with %d bytes unread",
            _address(connection),
            self._limits.write_s,
            transport.get_write_buffer_size(),
        )
        transport.abort()

    def close_idle(self, idle_s: float) -> bool:
        """Close connections that have been idle for ``idle_s`` seconds; return True while others wait."""
        idle = [each for each in self.connections if isinstance(each, ClientConnection) and each.is_idle]
        waits_since_s = self._loop.time() - idle_s
        closed = [each for each in idle if each.idle_until_s - self._limits.idle_s <= waits_since_s]
        for connection in closed:
            connection.close()
        return len(closed) < len(idle)

    def _idle_ended(self) -> bool:
        """Close the connections that have been idle for longest; return False when none is idle."""
        idle = (each for each in self.connections if isinstance(each, ClientConnection) and each.is_idle)
        ended = heapq.nsmallest(max(1, self._most // 64), idle, key=lambda each: each.idle_until_s)
        for connection in ended:
            connection.force_close()
            self.closed("made_room")
        return bool(ended)

    def _refuse(self, connection: socket.socket) -> None:
        self._refused += 1
        self.closed("too_many_connections")
        message = f"{self._most} connections are open, and no more may be ({self._limits.option}). Try again."
        with suppress(OSError):
            connection.setblocking(False)
            connection.send(raw_answer(503, message, "too_many_connections"))
            connection.shutdown(socket.SHUT_WR)
        if len(self._lingering) >= MOST_LINGERING:
            connection.close()
            return
        self._lingering.add(connection)
        self._loop.call_later(LINGER_S, self._let_go, connection)

    def _let_go(self, connection: socket.socket) -> None:
        self._lingering.discard(connection)
        connection.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Close every connection, those too that wait for their last bytes to be read."""
        await super().shutdown(timeout)
        for connection in list(self._lingering):
            self._let_go(connection)
