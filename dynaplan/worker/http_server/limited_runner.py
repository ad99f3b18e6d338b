"""Runs an aiohttp application for clients that nobody knows, each connection held to its limits."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from aiohttp import web

from dynaplan.util.tls import ServerTls
from dynaplan.worker.http_server.acceptor import Acceptor
from dynaplan.worker.http_server.connections import ClientServer, ConnectionLimits


class LimitedRunner(web.AppRunner):
    """aiohttp's runner of an application, with a ``ClientServer`` in the place of aiohttp's own server."""

    def __init__(self, app: web.Application, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, keepalive_timeout=limits.idle_s, **options)
        self._limits = limits
        self._watching: asyncio.Task[None] | None = None
        self._client_server: ClientServer | None = None
        self._acceptor: Acceptor | None = None

    def listen(
        self, listen_on: socket.socket, *, is_alone: bool = True, tls: ServerTls | None = None
    ) -> None:
        """Take the connections of this socket, after ``setup``; see ``Acceptor``."""
        assert self._client_server
        self._acceptor = Acceptor(listen_on, self._client_server.welcome, is_alone=is_alone, tls=tls)
        self._acceptor.start()

    async def stop_listening(self) -> None:
        """Take no more connections; open ones go on. Twice is once."""
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
        server = ClientServer(
            app._handle, self._limits, lambda _: None, request_factory=app._make_request, **options
        )
        self._watching = asyncio.create_task(server.watch())
        self._client_server = server
        return server
