"""The HTTP server of worker and frontend: aiohttp's, with limits for every connection, one acceptor, and TLS.

1. **Accept one connection at a time**, so that processes that share one listening socket share the load. The
   event loops' own servers accept all that waits when they wake up: of two processes on one socket the first
   to wake took all of 64 connections. One connection for each turn of the loop is not enough, because the
   first is awake already when the next one comes. So each process that is not alone stops accepting for a
   moment after a connection, and the others take the next ones. docs/decisions/0032 has the figures.
2. **Handshake.** With TLS the handshake comes first, and at the end what was written is sent.
3. **Limits.** aiohttp answers a head with a line or a field that is too long, and closes idle connections.
   It does not bound the size of a head, nor the time that one takes, and it waits for ever for a client that
   does not read. Requests pay for none of this: a check of all connections every second finds those that are
   stalled.
"""

from __future__ import annotations

import asyncio
import errno
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
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.util.tls import ServerTls
from dynaplan.worker.timing import (
    ACCEPT_PAUSE_S,
    ACCEPT_YIELD_S,
    CONNECTIONS_POLL_S,
    HANDSHAKE_TIMEOUT_S,
    HEAD_TIMEOUT_S,
    LAST_BYTES_S,
    LAST_HANDSHAKES_S,
    REFUSAL_LINGER_S,
    TLS_CLOSE_TIMEOUT_S,
)


class LimitedRunner(web.AppRunner):
    """aiohttp's runner of an application, with a ``LimitedServer`` in the place of aiohttp's own server."""

    def __init__(self, app: web.Application, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, keepalive_timeout=limits.idle_s, **options)
        self._limits = limits
        self._watching: asyncio.Task[None] | None = None
        self._client_server: LimitedServer | None = None
        self._acceptor: Acceptor | None = None

    def listen(
        self, listen_on: socket.socket, *, is_alone: bool = True, tls: ServerTls | None = None
    ) -> None:
        """Take the connections of this socket, after ``setup``; see ``Acceptor``."""
        assert self._client_server
        self._acceptor = Acceptor(listen_on, self._client_server.welcome, is_alone=is_alone, tls=tls)
        self._acceptor.start()

    async def stop_listening(self) -> None:
        """Take no more connections; open ones continue. Idempotent."""
        if self._acceptor:
            await self._acceptor.stop()

    async def cleanup(self) -> None:
        """Stop listening, end the watch over slow clients, and close every connection."""
        await self.stop_listening()
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().cleanup()
        if self._acceptor:
            await self._acceptor.closed()

    async def _make_server(self) -> web.Server:
        await super()._make_server()  # starts the application up
        options = {key: self._kwargs[key] for key in self._kwargs if key != "keepalive_timeout"}
        app: Any = self.app
        server = LimitedServer(
            app._handle, self._limits, lambda _: None, request_factory=app._make_request, **options
        )
        self._watching = asyncio.create_task(server.watch())
        self._client_server = server
        return server


log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues before they are accepted."""


_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts on one socket, which others may listen on too, from ``start`` to ``stop``.

    ``welcome`` makes the protocol of an accepted connection, or None when it has dealt with it otherwise.
    ``is_alone`` says that no other process accepts there; ``tls`` is what connections speak, None for clear.
    """

    def __init__(
        self,
        listen_on: socket.socket,
        welcome: Callable[[socket.socket], asyncio.Protocol | None],
        *,
        is_alone: bool = True,
        tls: ServerTls | None = None,
    ) -> None:
        self._socket = listen_on
        self._welcome = welcome
        self._is_alone = is_alone
        self._loop = asyncio.get_running_loop()
        self._connecting = BackgroundTasks()
        self._handshakes = TlsHandshakes(tls) if tls else None
        self._pause: asyncio.TimerHandle | None = None
        self.address: tuple[str, int] = listen_on.getsockname()[:2]

    def start(self) -> None:
        """Listen on the bound socket, and hand every accepted connection on."""
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        # Accepted connections inherit it: otherwise, for a minute after this server has closed some first, as
        # one that is killed does, nobody could bind the port.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._loop.add_reader(self._socket, self._accept)

    async def stop(self) -> None:
        """Accept what waits already, and close this process's copy of the socket. Idempotent.

        Returns when what these connections have brought has been read.
        """
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket)
        for _ in range(BACKLOG):
            if not self._accept_one():
                break
        if self._pause:
            self._pause.cancel()
        self._socket.close()
        await self._connecting.finish(LAST_HANDSHAKES_S if self._handshakes else LAST_BYTES_S)
        await asyncio.sleep(LAST_BYTES_S)

    async def closed(self) -> None:
        """Return when the clients of connections over TLS have all that was written, and they are closed.

        They are closing. Those in clear text report themselves what they have not sent.
        """
        if self._handshakes:
            await self._handshakes.closed()

    def _accept(self) -> None:
        if self._accept_one() and not self._is_alone:
            self._pause_accepting(ACCEPT_YIELD_S)

    def _accept_one(self) -> bool:
        """Accept a connection; return False when none waits, or there are no resources for one."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                log.error("no connection can be accepted: %s; trying again soon", error.strerror)
                self._pause_accepting(ACCEPT_PAUSE_S)
            return False
        protocol = self._welcome(connection)
        if protocol is not None:
            self._connecting.spawn(self._connect(protocol, connection))
        return True

    async def _connect(self, protocol: asyncio.Protocol, connection: socket.socket) -> None:
        if self._handshakes:
            await self._handshakes.connect(protocol, connection)
        else:
            await self._loop.connect_accepted_socket(lambda: protocol, connection)

    def _pause_accepting(self, seconds: float) -> None:
        """Stop accepting for a while, without the reader, which would wake the loop all the time."""
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(seconds, self._resume_accepting)

    def _resume_accepting(self) -> None:
        self._pause = None
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)


MAX_HANDSHAKES = 1024
"""Concurrent handshakes; another one cancels the oldest."""


class TlsHandshakes:
    """Makes connections of accepted sockets, once their clients have shaken hands; knows the open ones."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._waiting: dict[asyncio.Task[Any], None] = {}
        self._open: set[_TrackedProtocol] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def connect(self, protocol: asyncio.Protocol, connection: socket.socket) -> None:
        """Shake hands and give the connection to ``protocol``; one whose handshake fails is closed."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._waiting) >= MAX_HANDSHAKES:
            next(iter(self._waiting)).cancel()
        self._waiting[task] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _TrackedProtocol(protocol, self),
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=TLS_CLOSE_TIMEOUT_S,
            )
        except OSError as error:
            log.debug("no handshake: %s", error)
        finally:
            self._waiting.pop(task, None)

    async def closed(self) -> None:
        """Return when no connection is open: the event loops' TLS does not report what it has not sent yet.

        Closing connections are open until their client has all of it.
        """
        await self._none_open.wait()

    def opened(self, connection: _TrackedProtocol) -> None:
        self._open.add(connection)
        self._none_open.clear()

    def lost(self, connection: _TrackedProtocol) -> None:
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()


class _TrackedProtocol(asyncio.Protocol):
    """Forwards everything to a protocol, and reports when the connection opens and closes."""

    def __init__(self, protocol: asyncio.Protocol, handshakes: TlsHandshakes) -> None:
        self._handshakes = handshakes
        self._protocol = protocol
        self.data_received = protocol.data_received  # type: ignore[method-assign]
        self.eof_received = protocol.eof_received  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._handshakes.opened(self)
        self._protocol.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._handshakes.lost(self)
        self._protocol.connection_lost(exc)


MAX_HEADERS = 100
MAX_LINE_BYTES = 8190
"""Largest request line, and largest header, in bytes; aiohttp's own default."""

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line and headers together, in bytes."""


MAX_CONNECTIONS = 8192
"""Connections that are held at most when the file descriptors would allow more: each takes about 30 kB."""

RESERVED_DESCRIPTORS = 100
DESCRIPTORS_PER_CONNECTION = 2
"""A request takes the client's connection and one to a worker."""


MAX_LINGERING = 100
"""Refused connections that stay open at once; further ones are closed without waiting."""


@dataclass(frozen=True)
class ConnectionLimits:
    """The limits that can be set. Times are in seconds; ``most`` 0 is as many as descriptors allow.

    ``option`` raises ``most``: it is named in a refusal.
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


class ClientConnection(web.RequestHandler):
    """aiohttp's protocol, which counts the bytes of a head that is not complete."""

    head_bytes = 0
    stalled_since_s = 0.0
    last_progress: tuple[object, ...] = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that has grown too large is answered 431, and the connection closed."""
        is_head = self.is_idle or self._is_answering_whole()
        super().data_received(data)
        if is_head:
            self.head_bytes = 0 if self._messages else self.head_bytes + len(data)
            if self.head_bytes > MAX_HEAD_BYTES and isinstance(self._manager, LimitedServer):
                self._manager.closed("head_too_large")
                self.close_with(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes", "head_too_large")

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
        """Return what the client holds up; it changes when the client continues, and is empty for nothing."""
        if self.transport is None:
            return ()
        unsent_bytes = self.transport.get_write_buffer_size()
        if unsent_bytes:
            request = self._current_request
            written = request.writer.output_size if request is not None else 0
            unread_bytes = unsent_bytes + _unacknowledged_bytes(self.transport)
            return ("write_timeout", id(request), written - unread_bytes)
        return ("head_timeout", self._request_count) if self.head_bytes else ()

    def close_with(self, status: int, message: str, code: str) -> None:
        """Answer, unless an answer is under way, and close the connection."""
        if self.transport is not None and self._current_request is None:
            self.transport.write(raw_error(status, message, code))
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


def raw_error(status: int, message: str, code: str) -> bytes:
    """Return an error of OpenAI's shape as the bytes of a whole answer, after which the connection closes."""
    kind = "service_unavailable" if status == 503 else "invalid_request_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    retry = "Retry-After: 5\r\n" if status == 503 else ""
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\n{retry}"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


_REASONS = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


class LimitedServer(web.Server):
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
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            **options,
        )
        self._limits = limits
        self._most = limits.most_connections
        self.closed = closed
        self._refused = 0
        self._lingering: set[socket.socket] = set()
        self._has_any = asyncio.Event()

    def __call__(self) -> ClientConnection:
        return ClientConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """Count a connection; while there is none, nothing is checked."""
        super().connection_made(handler, transport)
        self._has_any.set()

    def welcome(self, connection: socket.socket) -> ClientConnection | None:
        """Take an accepted connection; when there are too many, idle ones go, or this one is refused."""
        if len(self._connections) < self._most or self._close_idle():
            return self()
        self._refuse(connection)
        return None

    async def watch(self) -> None:
        """End the connections that stand still, until it is cancelled."""
        limits = self._limits
        every_s = min(CONNECTIONS_POLL_S, limits.write_s / 4, limits.head_s / 4)
        while True:
            await asyncio.sleep(every_s)
            if not self._connections:
                self._has_any.clear()
                await self._has_any.wait()
            self._check_connections(self._loop.time())

    def _check_connections(self, now_s: float) -> None:
        slow_heads = 0
        for connection in self._stalled(now_s):
            if connection.last_progress[0] == "head_timeout":
                slow_heads += 1
                message = f"The headers were not complete after {self._limits.head_s:g} s"
                connection.close_with(408, message, "head_timeout")
            else:
                self._abort(connection)
            self.closed(str(connection.last_progress[0]))
        if slow_heads:
            log.info("%d connections closed: their headers took too long", slow_heads)
        if self._refused:
            log.error("%d connections refused: %d are open, and no more may be", self._refused, self._most)
            self._refused = 0

    def _stalled(self, now_s: float) -> Iterator[ClientConnection]:
        """Yield the connections on which a client has sent no head, or taken no answer, for its timeout."""
        times_s = {"head_timeout": self._limits.head_s, "write_timeout": self._limits.write_s}
        for connection in self.connections:
            assert isinstance(connection, ClientConnection)
            progress = connection.progress()
            if progress != connection.last_progress:
                connection.last_progress, connection.stalled_since_s = progress, now_s
            elif progress and now_s - connection.stalled_since_s >= times_s[str(progress[0])]:
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

    def _close_idle(self) -> bool:
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
            connection.send(raw_error(503, message, "too_many_connections"))
            connection.shutdown(socket.SHUT_WR)
        if len(self._lingering) >= MAX_LINGERING:
            connection.close()
            return
        self._lingering.add(connection)
        self._loop.call_later(REFUSAL_LINGER_S, self._close_refused, connection)

    def _close_refused(self, connection: socket.socket) -> None:
        self._lingering.discard(connection)
        connection.close()

    async def shutdown(self, timeout: float | None = None) -> None:
        """Close every connection, those too that wait for their last bytes to be read."""
        await super().shutdown(timeout)
        for connection in list(self._lingering):
            self._close_refused(connection)
