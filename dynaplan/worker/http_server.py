"""What the HTTP servers of worker and frontend share: one acceptor, TLS, and limits for every connection.

The workers' own server is aiohttp's (``LimitedServer``), the frontend's is ``gateway.client_connection``.

1. **Accept one connection at a time**, so that processes that share one listening socket share the load. The
   event loops' own servers accept all that waits when they wake up: of two processes on one socket the first
   to wake took all of 64 connections. One connection for each turn of the loop is not enough, because the
   first is awake already when the next one comes. So each process that is not alone stops accepting for a
   moment after a connection, and the others take the next ones. docs/decisions/0032 has the figures.
2. **Handshake.** With TLS the handshake comes first, and at the end what was written is sent.
3. **Limits.** ``LimitedConnections`` holds those of a server, aiohttp's or the gateway's, to the time that a
   head may take, that a client may go without reading and a connection without a request, and to a number.
   Requests pay for none of this: a check of all connections every second finds those that are stalled.
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
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, cast

from aiohttp import web

from dynaplan.util.descriptors import descriptor_limit
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.util.tls import ServerTls
from dynaplan.worker.timing import (
    ACCEPT_PAUSE_S,
    ACCEPT_YIELD_S,
    CONNECTIONS_POLL_S,
    FIRST_REQUEST_S,
    HANDSHAKE_TIMEOUT_S,
    HEAD_TIMEOUT_S,
    LAST_BYTES_S,
    LAST_HANDSHAKES_S,
    NO_ROOM_PAUSE_S,
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
        limited = self._client_server.limited
        self._acceptor = Acceptor(
            listen_on, limited.welcome, has_room=limited.has_room, is_alone=is_alone, tls=tls
        )
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
        server = LimitedServer(app._handle, self._limits, request_factory=app._make_request, **options)
        self._watching = asyncio.create_task(server.limited.watch())
        self._client_server = server
        return server


log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues before they are accepted."""


_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts on one socket, which others may listen on too, from ``start`` to ``stop``.

    ``welcome`` makes the protocol of an accepted connection; while ``has_room`` says no, connections wait in
    the kernel. ``is_alone`` says that no other process accepts there; ``tls`` is what connections speak, None
    for clear.
    """

    def __init__(
        self,
        listen_on: socket.socket,
        welcome: Callable[[socket.socket], asyncio.Protocol],
        *,
        has_room: Callable[[], bool] = lambda: True,
        is_alone: bool = True,
        tls: ServerTls | None = None,
    ) -> None:
        self._socket = listen_on
        self._welcome = welcome
        self._has_room = has_room
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
        """Accept what waits already, and close this process's copy of the socket. Twice is once.

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
        if not self._has_room():
            self._pause_accepting(NO_ROOM_PAUSE_S)
        elif self._accept_one() and not self._is_alone:
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
        self._connecting.spawn(self._connect(self._welcome(connection), connection))
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
"""Connections that are held at most, whatever the file descriptors allow: an open stream takes 20 kB."""

RESERVED_DESCRIPTORS = 100
DESCRIPTORS_PER_CONNECTION = 2
"""A request takes the client's connection and one to a worker."""


MAX_REFUSED = 50
"""Refused connections that are open at once, to be read to their end; further ones wait in the kernel."""


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
    """The open connections of one server, each held to the limits.

    ``make`` makes the protocol of a connection, which reports to ``opened`` and ``lost``; ``closed(reason)``
    is called for each that is closed over a limit.
    """

    def __init__(
        self,
        limits: ConnectionLimits,
        make: Callable[[], asyncio.Protocol],
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

    def welcome(self, _: socket.socket) -> asyncio.Protocol:
        """Take an accepted connection; when there are too many, idle ones go, or this one is refused."""
        if len(self.open) < self._most or self._make_room():
            return self._make()
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
        every_s = min(CONNECTIONS_POLL_S, limits.write_s / 4, limits.head_s / 4, limits.idle_s / 4)
        while True:
            await asyncio.sleep(every_s)
            if not self.open:
                self._report_refusals()
                self._has_any.clear()
                await self._has_any.wait()
            self._check(self._loop.time())

    def close_idle(self, idle_s: float) -> bool:
        """Close connections that have been idle for ``idle_s`` seconds; return True while others wait."""
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
    """Tell whether no request is on its way over the idle connection."""
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


class BoundedConnection(web.RequestHandler):
    """aiohttp's protocol, which counts the bytes of a head that is not complete."""

    head_bytes = 0
    stalled_since_s = 0.0
    last_progress: tuple[object, ...] = ()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a head that has grown too large is answered 431, and the connection closed."""
        is_head = self._awaits_head()
        super().data_received(data)
        if is_head:
            self.head_bytes = 0 if self._messages else self.head_bytes + len(data)
            if self.head_bytes > MAX_HEAD_BYTES and isinstance(self._manager, LimitedServer):
                self._manager.limited.closed("head_too_large")
                self.close_with(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes", "head_too_large")

    def _awaits_head(self) -> bool:
        """Tell whether the next bytes begin a head, or go on with one.

        A connection's first bytes always do: on uvloop they may come before aiohttp waits for a request.
        """
        return not self._request_count or self._waits_for_request() or self._is_answering_whole()

    def _waits_for_request(self) -> bool:
        """Tell whether aiohttp waits for the next request, which is what its ``_waiter`` is for."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def is_idle(self) -> bool:
        return self._waits_for_request() and not self.head_bytes

    @property
    def has_asked(self) -> bool:
        return self._request_count > 0

    @property
    def idle_since_s(self) -> float:
        return self._next_keepalive_close_time - self.keepalive_timeout

    def _is_answering_whole(self) -> bool:
        """Tell whether the request that is being answered has come whole: what follows is another head."""
        request = self._current_request
        return request is not None and not self._messages and request.content.is_eof()

    def progress(self) -> tuple[object, ...]:
        if self.transport is None:
            return ()
        if self.transport.get_write_buffer_size():
            request = self._current_request
            written = request.writer.output_size if request is not None else 0
            return ("write_timeout", id(request), written - unread_bytes(self.transport))
        return ("head_timeout", self._request_count) if self.head_bytes else ()

    def close_with(self, status: int, message: str, code: str) -> None:
        if self.transport is not None and self._current_request is None:
            self.transport.write(raw_error(status, message, code))
        self.force_close()

    def close_idle(self) -> None:
        self.force_close()


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


class LimitedServer(web.Server):
    """aiohttp's server with limits, for the workers' own routes."""

    def __init__(
        self, handler: Callable[[web.BaseRequest], Any], limits: ConnectionLimits, **options: Any
    ) -> None:
        super().__init__(
            handler,
            keepalive_timeout=limits.idle_s,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            **options,
        )
        self.limited = LimitedConnections(limits, self, lambda _: None)

    def __call__(self) -> BoundedConnection:
        return BoundedConnection(self, loop=self._loop, **self._kwargs)

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self.limited.opened(handler)

    def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.limited.lost(handler)

    async def shutdown(self, timeout: float | None = None) -> None:
        """Close every connection, those too that wait for their last bytes to be read."""
        await super().shutdown(timeout)
        self.limited.close_refused()
