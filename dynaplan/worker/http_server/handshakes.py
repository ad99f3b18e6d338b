"""TLS of accepted connections: the handshake comes first, and at the end what was written is sent."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from dynaplan.util.tls import ServerTls

log = logging.getLogger(__name__)

HANDSHAKE_WITHIN_S = 10.0
"""Time that a client may take for its handshake."""

CLOSE_WITHIN_S = 15.0
"""Time that a closed connection may take to send the rest, and its client to say that it has all."""

MOST_HANDSHAKES = 1024
"""Handshakes at once; with another one the oldest ends."""


class Handshakes:
    """Makes connections of accepted sockets, once their clients have shaken hands; knows the open ones."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._waiting: dict[asyncio.Task[Any], None] = {}
        self._open: set[_Watched] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def connect(self, protocol: asyncio.Protocol, connection: socket.socket) -> None:
        """Shake hands and give the connection to ``protocol``; one whose handshake fails is closed."""
        task = asyncio.current_task()
        assert task is not None
        if len(self._waiting) >= MOST_HANDSHAKES:
            next(iter(self._waiting)).cancel()
        self._waiting[task] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Watched(protocol, self),
                connection,
                ssl=self._tls.context,
                ssl_handshake_timeout=HANDSHAKE_WITHIN_S,
                ssl_shutdown_timeout=CLOSE_WITHIN_S,
            )
        except OSError as error:
            log.debug("no handshake: %s", error)
        finally:
            self._waiting.pop(task, None)

    async def closed(self) -> None:
        """Return when no connection is open: the event loops' TLS does not tell what it has not sent yet.

        Connections that were told to close are open until their client has all of it.
        """
        await self._none_open.wait()

    def opened(self, connection: _Watched) -> None:
        """Note that a connection is open."""
        self._open.add(connection)
        self._none_open.clear()

    def lost(self, connection: _Watched) -> None:
        """Note that a connection is not open any more."""
        self._open.discard(connection)
        if not self._open:
            self._none_open.set()


class _Watched(asyncio.Protocol):
    """Passes everything on to a protocol, and tells of the connection's beginning and end."""

    def __init__(self, protocol: asyncio.Protocol, handshakes: Handshakes) -> None:
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
