"""The HTTP server of one worker: routes behind a token, work in flight counted, refused while draining."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.request_ids import add_request_id
from dynaplan.http.routes import Route
from dynaplan.http.tls import ServerTls
from dynaplan.store.instances import is_loopback
from dynaplan.util.errors import ConfigError, nearest
from dynaplan.util.sockets import bound_socket, url_of
from dynaplan.worker.http_server import LimitedRunner

log = logging.getLogger(__name__)

DRAINING_HEADER = "x-dynaplan-draining"
"""On a 503: this worker is leaving; the request was not touched and is safe to send to another one."""

MAX_BODY_BYTES = 64 * 1024 * 1024

WORKER_LIMITS = ConnectionLimits(write_s=math.inf, option="ulimit -n")
"""The limits of a worker's own server: those of the public ones, but a slow reader is not closed.

Its readers are frontends, which are as slow as their clients and close those; a connection that broke off
here would look like the worker's death.
"""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class InFlight:
    """Counts the work in flight, from a request's arrival until its response is sent or its client gone."""

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
        await self._idle.wait()


class WorkerServer:
    """Serves routes from one socket, which is bound from the beginning, so that its ``url`` is certain.

    More routes can be added while it serves.

    ``token``, unless empty, is what a caller must bear for every route that is not open. Once ``drain`` was
    called, routes that are work answer 503 with ``x-dynaplan-draining: 1``; the others continue, because
    finishing may need them. One for the public, with ``limits`` of its clients' connections, stops listening
    then too, so that the kernel gives new connections to the others that share its port; the others have
    ``WORKER_LIMITS``. ``advertised`` is the host name by which others know the socket's address; with
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
        self._limits = limits or WORKER_LIMITS
        self._credentials = f"Bearer {token}".encode() if token else b""
        self._table = web.UrlDispatcher()
        self._runner: LimitedRunner | None = None
        self.in_flight = InFlight()
        self.is_draining = False

    async def start(self, routes: Sequence[Route]) -> None:
        """Serve these routes, beside those added before, on the socket; returns once it listens."""
        self.add(routes)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        # An application's own router takes nothing more once it serves.
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        app.on_response_prepare.append(add_request_id)
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


WILDCARD_HOSTS = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True)
class Address:
    """A bound socket of the component's own server, and the host name or address that others know it by."""

    socket: socket.socket
    host: str


def bind_advertised(host: str | None, *, has_token: bool, port: int = 0) -> Address | None:
    """Return the bound address of ``--advertise-host``; None for loopback, which needs nothing.

    ``port`` 0 takes a free one.

    Raises ConfigError without a token that was named: other hosts could not have one that is made here. So
    does a host that is not an address of this machine.
    """
    if not host or is_loopback(host):
        return None
    if host in WILDCARD_HOSTS:
        raise ConfigError(
            f"--advertise-host {host}: nobody can call that",
            hint="Expected a name or an address of this machine, as other hosts know it.",
        )
    if not has_token:
        raise ConfigError(
            f"--advertise-host {host}: other hosts reach it, so the namespace's token must be named",
            hint="Use --token-file, with the same file on every host: "
            "`(umask 077; openssl rand -hex 32 > FILE)` makes one.",
        )
    bare = host.strip("[]")
    try:
        address = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0][4][0]
        bound = bound_socket(str(address), port)
    except (OSError, UnicodeError) as error:
        fault = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--advertise-host {host}{f', port {port}' if port else ''}: {fault}",
            hint="Expected a name or an address of this machine, as other hosts know it"
            f"{', and a free port' if port else ''}.",
        ) from error
    return Address(bound, bare)
