"""Accepting connections, and their TLS handshakes, on a socket that other processes may listen on too.

1. **An equal part**, so that processes that share one listening socket share the load. The event loops' own
   servers accept all that waits when they wake up: of two processes on one socket the first to wake took all
   of 64 connections. Here each takes what it lacks to an equal part (``accept_shares``), several in a turn of
   its loop, and stops accepting for a moment where that is nothing, so that the others take the rest.
   docs/decisions/0032 has the figures.
2. **Handshake.** With TLS the handshake comes first, and at the end what was written is sent.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import sys
import weakref
from collections.abc import Callable
from typing import Any

from dynaplan.http.accept_shares import AcceptShares
from dynaplan.http.timing import (
    ACCEPT_PAUSE_S,
    ACCEPT_YIELD_S,
    HANDSHAKE_TIMEOUT_S,
    LAST_BYTES_S,
    LAST_HANDSHAKES_S,
    NO_ROOM_PAUSE_S,
    TLS_CLOSE_TIMEOUT_S,
)
from dynaplan.http.tls import ServerTls
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues before they are accepted."""

MAX_ACCEPTED_A_TURN = 16
"""Connections that a process accepts in a turn of the loop, which takes some 0.5 ms."""


_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections on one socket, which other processes may listen on too, from ``start`` to ``stop``.

    ``welcome`` makes the protocol of an accepted connection; while ``has_room`` says no, connections wait in
    the kernel. ``shares`` divides them among the processes. ``tls`` is what connections speak, None for
    clear.
    """

    def __init__(
        self,
        listen_on: socket.socket,
        welcome: Callable[[socket.socket], asyncio.Protocol],
        *,
        has_room: Callable[[], bool] = lambda: True,
        shares: AcceptShares | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        self._socket = listen_on
        self._welcome = welcome
        self._has_room = has_room
        self._shares = shares or AcceptShares()
        self._loop = asyncio.get_running_loop()
        self._accepted: set[weakref.ref[socket.socket]] = set()
        """The connections of this process; uvloop lets go of closed ones, and of failed handshakes."""
        self._connecting = BackgroundTasks()
        self._handshakes = TlsHandshakes(tls) if tls else None
        self._pause: asyncio.TimerHandle | None = None
        self.address: tuple[str, int] = listen_on.getsockname()[:2]

    def start(self) -> None:
        """Listen on the bound socket, and hand every accepted connection on."""
        self._socket.setblocking(False)
        self._socket.listen(BACKLOG)
        # Accepted connections inherit both. Without the first nobody could bind the port for a minute after
        # this server has closed some first, as one that is killed does. Without the second the end of a
        # stream would wait 40 ms until the client's kernel has acknowledged what came before.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._loop.add_reader(self._socket, self._accept)

    async def stop(self) -> None:
        """Accept what waits already, and close this process's copy of the socket. Twice is once.

        Returns when what these connections have brought has been read.
        """
        if self._socket.fileno() < 0:
            return
        self._shares.close()
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
        """Return when all TLS connections, which are to be closing already, have sent everything and closed.

        Connections in clear text are not waited for: they report themselves what they have not sent.
        """
        if self._handshakes:
            await self._handshakes.closed()

    def _accept(self) -> None:
        if not self._has_room():
            self._pause_accepting(NO_ROOM_PAUSE_S)
            return
        waiting = _count_waiting(self._socket)
        lacking = self._shares.lacking(len(self._accepted), waiting)
        if waiting and not lacking:
            self._pause_accepting(ACCEPT_YIELD_S)
        # None waits when another process was faster, or where the kernel does not count them (gVisor's).
        for _ in range(min(lacking, MAX_ACCEPTED_A_TURN) if waiting else 1):
            if not (self._accept_one() and self._has_room()):
                break

    def _accept_one(self) -> bool:
        """Accept a connection; return False when none waits, or there are no resources for one."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                log.error("no connection can be accepted: %s; trying again soon", error.strerror)
                self._pause_accepting(ACCEPT_PAUSE_S)
            return False
        self._accepted.add(weakref.ref(connection, self._lost))
        self._shares.publish(len(self._accepted))
        self._connecting.spawn(self._connect(self._welcome(connection), connection))
        return True

    def _lost(self, connection: weakref.ref[socket.socket]) -> None:
        self._accepted.discard(connection)
        self._shares.publish(len(self._accepted))

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


def _count_waiting(listening: socket.socket) -> int:
    """Return the number of connections that nobody has accepted (``tcpi_unacked`` of a listening socket)."""
    return int.from_bytes(listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:], sys.byteorder)


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
        """Return when no connection is open; a closing one counts as open until its client has everything.

        There is no other way to know: the event loops' TLS does not report what it has not sent yet.
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
