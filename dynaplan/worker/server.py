"""The HTTP server of one worker: routes behind a token, work in flight counted, refused while draining."""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynaplan.http.accept_shares import AcceptShares
from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import BodyTooLarge, InvalidBody, Request, Response
from dynaplan.http.route_table import RouteTable
from dynaplan.http.routes import Route
from dynaplan.http.server import HttpServer
from dynaplan.http.tls import ServerTls
from dynaplan.store.instances import is_loopback
from dynaplan.util.errors import ConfigError, UserError, nearest
from dynaplan.util.sockets import bound_socket, url_of

log = logging.getLogger(__name__)

DRAINING_HEADER = "x-dynaplan-draining"
"""On a 503: this worker is leaving; the request was not touched and is safe to send to another one."""

NO_HEADERS: Mapping[str, str] = {}

WORKER_LIMITS = ConnectionLimits(write_s=math.inf, option="ulimit -n")
"""The limits of a worker's own server: those of the public ones, but a slow reader is not closed.

Its readers are frontends, which are as slow as their clients and close those; a connection that broke off
here would look like the worker's death.
"""


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
    then too, and divides connections with the other processes on the socket by ``shares``; the others have
    ``WORKER_LIMITS``. ``advertised`` is the host name by which others know the socket's address; with ``tls``
    it speaks https.
    """

    def __init__(
        self,
        listen_on: socket.socket,
        token: str,
        limits: ConnectionLimits | None = None,
        advertised: str = "",
        tls: ServerTls | None = None,
        shares: AcceptShares | None = None,
    ) -> None:
        self._socket = listen_on
        host, port = listen_on.getsockname()[:2]
        self.url = url_of(advertised or host, port, is_tls=tls is not None)
        self._tls = tls
        self._shares = shares
        self._is_public = limits is not None
        self._limits = limits or WORKER_LIMITS
        self._credentials = f"Bearer {token}".encode() if token else b""
        self._table = RouteTable()
        self._server: HttpServer | None = None
        self.in_flight = InFlight()
        self.is_draining = False

    async def start(self, routes: Sequence[Route]) -> None:
        """Serve these routes, beside those added before, on the socket; returns once it listens."""
        self.add(routes)
        self._server = HttpServer(self._answer, self._limits)
        self._server.listen(self._socket, shares=self._shares, tls=self._tls)

    def add(self, routes: Sequence[Route]) -> None:
        """Serve these routes too, from now on."""
        self._table.add(routes)

    async def drain(self) -> None:
        """Refuse new work from now on."""
        self.is_draining = True
        if self._server and self._is_public:
            await self._server.stop_listening()

    async def stop(self) -> None:
        """Close every connection, and with it whatever is still in flight."""
        if self._server:
            await self._server.close()
            await self._server.sent()
        self._socket.close()

    async def _answer(self, request: Request) -> Response | None:
        found = self._table.find(request.path, request.target)
        if not found:
            return self._unknown_path(request)
        if request.method not in found:
            return _another_method(request.path, found)
        route, fields = found[request.method]
        if not route.is_open and not self._bears_token(request):
            return _error("a valid worker token is needed", 401)
        is_work = route.is_work and not route.is_open
        if is_work and self.is_draining:
            return _refusal()
        if fields:
            request = request.with_fields(fields)
        if not (is_work and route.is_counted):
            return await _call(route, request)
        with self.in_flight:
            response = await _call(route, request)
            await _send_completely(request, response)
        return None

    def _unknown_path(self, request: Request) -> Response:
        if not self._bears_token(request):
            return _error("not found", 404)
        hint = nearest(request.path, self._table.paths)
        return _error(f"There is no {request.path} here. {hint}", 404)

    def _bears_token(self, request: Request) -> bool:
        given = request.headers.get("Authorization").encode("utf-8", "surrogateescape")
        return not self._credentials or hmac.compare_digest(given, self._credentials)


async def _call(route: Route, request: Request) -> Response | None:
    """Return the route's answer, or that of what it raises over the request."""
    try:
        answer = await route.handler(request)
    except (BodyTooLarge, InvalidBody, UserError) as error:
        return _error(str(error), 413 if isinstance(error, BodyTooLarge) else 400)
    if answer is not None and not isinstance(answer, Response):
        raise TypeError(f"a route answered {type(answer).__name__} instead of a response")
    return answer


def _error(message: str, status: int, headers: Mapping[str, str] = NO_HEADERS) -> Response:
    document = Response.json({"error": message}, status)
    return replace(document, headers={**document.headers, **headers}) if headers else document


def _another_method(path: str, allowed: Iterable[str]) -> Response:
    methods = ", ".join(sorted(allowed))
    return _error(f"{path} takes {methods} only", 405, {"Allow": methods})


def _refusal() -> Response:
    return _error("this worker is draining", 503, {DRAINING_HEADER: "1", "Connection": "close"})


async def _send_completely(request: Request, response: Response | None) -> None:
    """Send the answer, or the rest of it; return when the kernel has it: exiting then cuts nothing."""
    try:
        if response is not None:
            await request.connection.respond(request, response)
        await request.connection.flush()
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

    Raises ConfigError for a wildcard, and for a host that is no address of this machine; and for any other
    without ``has_token``: other hosts could not know a token that is made here.
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
