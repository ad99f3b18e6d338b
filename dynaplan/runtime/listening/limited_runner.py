"""Runs an aiohttp application for clients that nobody knows, each connection held to its limits."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from dynaplan.runtime.listening.connections import ClientServer, ConnectionLimits


class LimitedRunner(web.AppRunner):
    """aiohttp's runner of an application, with a ``ClientServer`` in the place of aiohttp's own server.

    ``client_server`` is there from ``setup`` on; its ``welcome`` takes accepted connections.
    """

    def __init__(self, app: web.Application, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(app, keepalive_timeout=limits.idle_s, **options)
        self._limits = limits
        self._watching: asyncio.Task[None] | None = None
        self.client_server: ClientServer | None = None

    async def cleanup(self) -> None:
        """End the watch over slow clients and close every connection."""
        if self._watching:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await super().cleanup()

    async def _make_server(self) -> web.Server:
        await super()._make_server()  # starts the application up
        options = {key: self._kwargs[key] for key in self._kwargs if key != "keepalive_timeout"}
        app: Any = self.app
        server = ClientServer(
            app._handle, self._limits, lambda _: None, request_factory=app._make_request, **options
        )
        self._watching = asyncio.create_task(server.watch())
        self.client_server = server
        return server
