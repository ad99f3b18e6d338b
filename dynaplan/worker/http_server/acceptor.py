"""Accept connections one at a time, so that processes that share one listening socket share the load.

The event loops' own servers accept all that waits when they wake up: of two processes on one socket the first
to wake took all of 64 connections. One connection for each turn of the loop is not enough, because the first
is awake already when the next one comes. So each process that is not alone looks away for a moment after a
connection, and the others take the next ones. docs/decisions/0032 has the figures.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable

from dynaplan.util.tasks import BackgroundTasks
from dynaplan.util.tls import ServerTls
from dynaplan.worker.http_server.handshakes import Handshakes

log = logging.getLogger(__name__)

BACKLOG = 1024
"""Connections that the kernel queues before they are accepted."""

POLITE_S = 0.001
"""Time without accepting after each connection, when other processes accept on the same socket."""

PAUSE_S = 0.5
"""Time without accepting after the machine had no resources for another connection."""

LAST_S = 0.02
"""Time for the first bytes of the last connections: they lie in the kernel already."""

LAST_HANDSHAKES_S = 1.0
"""Time for the handshakes that are under way at the end."""

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
        self._handshakes = Handshakes(tls) if tls else None
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
        await self._connecting.finish(LAST_HANDSHAKES_S if self._handshakes else LAST_S)
        await asyncio.sleep(LAST_S)

    async def closed(self) -> None:
        """Return when the clients of connections over TLS have all that was written, and they are closed.

        They have been told to close. Clear ones tell themselves what they have not sent.
        """
        if self._handshakes:
            await self._handshakes.closed()

    def _accept(self) -> None:
        if self._accept_one() and not self._is_alone:
            self._look_away(POLITE_S)

    def _accept_one(self) -> bool:
        """Accept a connection; return False when none waits, or there are no resources for one."""
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _NO_RESOURCES:
                log.error("no connection can be accepted: %s; trying again soon", error.strerror)
                self._look_away(PAUSE_S)
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

    def _look_away(self, seconds: float) -> None:
        """Stop accepting for a while: the socket stays readable, and would wake the loop all the time."""
        self._loop.remove_reader(self._socket)
        self._pause = self._loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._pause = None
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket, self._accept)
