"""The workers' own HTTP server: aiohttp's, with the acceptor and the limits of ``dynaplan.http``."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from aiohttp import web

from dynaplan.http.acceptor import Acceptor
from dynaplan.http.limits import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_LINE_BYTES,
    ConnectionLimits,
    LimitedConnections,
    raw_error,
    unread_bytes,
)
from dynaplan.http.tls import ServerTls


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
