"""The HTTP server of one worker: routes behind a token, work in flight counted, refused while draining."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from dynaplan.util.errors import nearest
from dynaplan.util.http_routes import Route
from dynaplan.util.sockets import url_of
from dynaplan.util.tls import ServerTls
from dynaplan.worker.http_server.connections import ConnectionLimits
from dynaplan.worker.http_server.limited_runner import LimitedRunner
from dynaplan.worker.named_requests import name_response

log = logging.getLogger(__name__)

DRAINING_HEADER = "x-dynaplan-draining"
"""On a 503: this worker is leaving; the request was not touched and is safe to send to another one."""

LARGEST_BODY_BYTES = 64 * 1024 * 1024

WORKERS_LIMITS = ConnectionLimits(write_s=math.inf, option="ulimit -n")
"""The limits of a worker's own server: those of the public ones, but a slow reader is not closed.

Its readers are frontends, which are as slow as their clients and close those; a connection that broke off
here would look like the worker's death.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InFlight:
    """The work in flight: counted from a request's arrival until its response is sent or its client gone."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __enter__(self) -> None:
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Return when nothing is in flight."""
        await self._idle.wait()


class WorkerServer:
    """Serves routes from one socket, which is bound from the beginning, so that its ``url`` is certain.

    More routes can be added while it serves.

    ``token``, unless empty, is what a caller must bear for every route that is not open. Once ``drain`` was
    called, routes that are work answer 503 with ``x-dynaplan-draining: 1``; the others go on, because
    finishing may need them. One for the public, with ``limits`` of its clients' connections, stops listening
    then too, so that the kernel gives new connections to the others that share its port; the others have
    ``WORKERS_LIMITS``. ``advertised`` is the host name by which others know the socket's address; with
    ``tls`` it speaks https.
    """

    def __init__(
        self,
        listen_on: socket.socket,
        token: str,
        limits: ConnectionLimits | None = None,
        advertised: str = "",
        tls: ServerTls | None = None,
    ) -> None:
        self._socket = listen_on
        host, port = listen_on.getsockname()[:2]
        self.url = url_of(advertised or host, port, is_tls=tls is not None)
        self._tls = tls
        self._is_public = limits is not None
        self._limits = limits or WORKERS_LIMITS
        self._credentials = f"Bearer {token}".encode() if token else b""
        self._table = web.UrlDispatcher()
        self._runner: LimitedRunner | None = None
        self.in_flight = InFlight()
        self.is_draining = False

    async def start(self, routes: Sequence[Route]) -> None:
        """Serve these routes, beside those added before, on the socket; returns once it listens."""
        self.add(routes)
        app = web.Application(client_max_size=LARGEST_BODY_BYTES)
        # An application's own router takes nothing more once it serves.
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        app.on_response_prepare.append(name_response)
        self._runner = LimitedRunner(
            app, self._limits, access_log=None, handler_cancellation=True, shutdown_timeout=0.5
        )
        await self._runner.setup()
        self._runner.listen(self._socket, is_alone=not self._is_public, tls=self._tls)

    def add(self, routes: Sequence[Route]) -> None:
        """Serve these routes too, from now on."""
        for route in routes:
            self._table.add_route(route.method, route.path, self._guarded(route))

    async def drain(self) -> None:
        """Refuse new work from now on."""
        self.is_draining = True
        if self._runner and self._is_public:
            await self._runner.stop_listening()

    async def stop(self) -> None:
        """Close every connection, and with it whatever is still in flight."""
        if self._runner:
            await self._runner.cleanup()
        self._socket.close()

    async def _dispatch(self, request: web.Request) -> web.StreamResponse:
        found = await self._table.resolve(request)
        if isinstance(found.http_exception, web.HTTPNotFound) and self._bears_token(request):
            return self._unknown_path(request.path)
        if isinstance(found.http_exception, web.HTTPMethodNotAllowed):
            return _another_method(request.path, found.http_exception.allowed_methods)
        request.match_info.clear()
        request.match_info.update(found)
        return await found.handler(request)

    def _unknown_path(self, path: str) -> web.Response:
        known = {resource.canonical for resource in self._table.resources()}
        return web.json_response({"error": f"There is no {path} here. {nearest(path, known)}"}, status=404)

    def _guarded(self, route: Route) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not route.is_open and not self._bears_token(request):
                return web.json_response({"error": "a valid worker token is needed"}, status=401)
            if not route.is_work or route.is_open:
                return _as_response(await route.handler(request))
            if self.is_draining:
                return _refusal()
            if not route.is_counted:
                return _as_response(await route.handler(request))
            with self.in_flight:
                response = _as_response(await route.handler(request))
                await _send_completely(request, response)
                return response

        return handle

    def _bears_token(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return not self._credentials or hmac.compare_digest(given, self._credentials)


def _as_response(answer: object) -> web.StreamResponse:
    if not isinstance(answer, web.StreamResponse):
        raise TypeError(f"a route answered {type(answer).__name__} instead of a response")
    return answer


def _another_method(path: str, allowed: set[str]) -> web.Response:
    methods = ", ".join(sorted(allowed))
    headers = {"Allow": methods}
    return web.json_response({"error": f"{path} takes {methods} only"}, status=405, headers=headers)


def _refusal() -> web.Response:
    headers = {DRAINING_HEADER: "1", "Connection": "close"}
    return web.json_response({"error": "this worker is draining"}, status=503, headers=headers)


async def _send_completely(request: web.Request, response: web.StreamResponse) -> None:
    """Send the rest of the response and return when the kernel has it: exiting then cuts nothing."""
    try:
        await response.prepare(request)
        await response.write_eof()
        transport = request.transport
        if transport is None or not transport.get_write_buffer_size():
            return
        transport.set_write_buffer_limits(high=0)
        await request.protocol._drain_helper()
        transport.set_write_buffer_limits()
    except ConnectionError:
        log.debug("the client of %s left before the end of its answer", request.path)
