"""The life of one worker process: prepare, serve, register, and at the end drain."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from dynaplan.engines.worker_load import GAUGE_PREFIX, load_gauges
from dynaplan.process.signals import on_signals
from dynaplan.store.instances import Instance
from dynaplan.store.registration import Registration
from dynaplan.util import metrics
from dynaplan.util.http_routes import Route
from dynaplan.worker.drain import FAILED_STOP_S, close, drain
from dynaplan.worker.endpoints import ServedEndpoint, check_route, internal_route, public_route
from dynaplan.worker.process import (
    EXIT_CRASHED,
    EXIT_CUT,
    EXIT_DRAINED,
    EXIT_HURRIED,
    ToldTwice,
    WorkerRuntime,
)
from dynaplan.worker.server import WorkerServer

log = logging.getLogger(__name__)

WHO_PATH = "/who"
"""The route that tells a bearer of the namespace's token the worker's name, and answers 401 to others."""


@dataclass(frozen=True)
class HostedService:
    """A service that can serve: its endpoints, the names it registers, the hooks to call at its end.

    ``checks`` are its own health checks: path -> functions that must return a true value.
    """

    endpoints: Sequence[ServedEndpoint] = ()
    registered: Sequence[str] = ()
    shutdown_hooks: Sequence[Callable[[], Any]] = ()
    checks: Mapping[str, Sequence[Callable[[], Any]]] = field(default_factory=dict)


@dataclass
class WorkerLife:
    """Runs one worker from its start hooks to its exit code.

    ``server`` is the worker's own HTTP server; ``public`` makes the one for ``@api`` endpoints, and is
    called only when there are any. ``has_signals``: SIGTERM and SIGINT mean this worker; False where the
    process has more than one, and tells them itself. ``is_in_foreground``: somebody at a terminal may tell it
    twice to end, and then it does not wait for its requests.
    """

    runtime: WorkerRuntime
    server: WorkerServer
    public: Callable[[], WorkerServer]
    drain_deadline_s: float
    has_signals: bool = True
    is_in_foreground: bool = False
    _servers: list[WorkerServer] = field(default_factory=list, init=False)
    _prepared: HostedService = field(default_factory=HostedService, init=False)

    async def live(self, prepare: Callable[[], Awaitable[HostedService]]) -> int:
        """Run to the end and return the exit code. Raises what ``prepare`` raises.

        Cancelling it cuts the requests off that are still held.
        """
        runtime = self.runtime
        registration = self._registration()
        with on_signals(self._signalled) if self.has_signals else nullcontext():
            try:
                await self._until_told(asyncio.create_task(self._begin(prepare, registration)))
                return await self._end(registration)
            except asyncio.CancelledError:
                await registration.deregister(1.0)
                raise
            finally:
                await close(runtime, FAILED_STOP_S)
                for server in {self.server, *self._servers}:
                    await server.stop()

    def _signalled(self, name: str) -> None:
        if self.is_in_foreground and self.runtime.told_to_leave.done():
            self.runtime.fail(ToldTwice())
        self.runtime.leave(f"{name} arrived")

    async def _until_told(self, beginning: asyncio.Task[None]) -> None:
        """Begin, and stay until the end is called for, which may be before the beginning is done."""
        endings: set[asyncio.Future[Any]] = {self.runtime.told_to_leave, self.runtime.failed}
        try:
            await asyncio.wait({beginning, *endings}, return_when=asyncio.FIRST_COMPLETED)
            if beginning.done():
                beginning.result()
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        finally:
            beginning.cancel()
            await asyncio.gather(beginning, return_exceptions=True)

    async def _begin(
        self, prepare: Callable[[], Awaitable[HostedService]], registration: Registration
    ) -> None:
        await self._serve(self.server, self._open_routes())
        log.info("starting: %s tells its health at %s", self.runtime.worker_name, self.runtime.url)
        self._prepared = prepared = await prepare()
        self.server.add([*self._service_routes(), *map(internal_route, prepared.endpoints)])
        public = [public_route(endpoint) for endpoint in prepared.endpoints if endpoint.is_public]
        if public:
            await self._serve(self.public(), public)
        await registration.start()
        self.runtime.ready.set()
        self.runtime.spawn(_leave_when_revoked(self.runtime, registration), "registration")
        log.info("ready: %s serves %s at %s", self.runtime.worker_name, self._names(), self.runtime.url)

    async def _end(self, registration: Registration) -> int:
        runtime = self.runtime
        if not runtime.failed.done():
            proof = await drain(
                runtime, self._servers, registration, self._prepared.shutdown_hooks, self.drain_deadline_s
            )
            if not runtime.failed.done():
                return EXIT_CUT if proof.cut else EXIT_DRAINED
        await registration.deregister(1.0)
        if runtime.is_hurried:
            log.warning("told twice to end: not waiting for what is held")
            return EXIT_HURRIED
        log.error("this worker failed: %r", runtime.failed.result())
        return EXIT_CRASHED

    async def _serve(self, server: WorkerServer, routes: Sequence[Route]) -> None:
        await server.start(routes)
        self._servers.append(server)

    def _registration(self) -> Registration:
        runtime = self.runtime
        return Registration(
            runtime.store,
            runtime.leases,
            runtime.clock,
            runtime.discovery,
            self._instances,
            runtime.lease_ttl_s,
            runtime.role,
        )

    def _instances(self, lease: int) -> Iterable[Instance]:
        runtime = self.runtime
        runtime.instance_id = lease
        return [
            Instance(
                runtime.namespace,
                runtime.component,
                endpoint,
                lease,
                runtime.url,
                worker=runtime.worker_name,
                pid=os.getpid(),
                card=runtime.card,
                engine_url=runtime.engine_url,
                host=os.uname().nodename,
                network=runtime.network,
                is_managed=runtime.is_managed,
                owner=runtime.owner,
            )
            for endpoint in self._names()
        ]

    def _names(self) -> Sequence[str]:
        return self._prepared.registered

    def _open_routes(self) -> Sequence[Route]:
        """Return the routes that are served from the beginning, before the service has started."""
        return (
            Route("GET", "/health", self._health, is_open=True, is_work=False),
            Route("GET", "/metrics", self._metrics, is_open=True, is_work=False),
            Route("GET", "/load_metrics", self._load_metrics, is_open=True, is_work=False),
            Route("GET", WHO_PATH, self._who, is_work=False),
        )

    def _service_routes(self) -> Sequence[Route]:
        return (
            *(check_route(path, checks) for path, checks in self._prepared.checks.items()),
            *self.runtime.routes,
        )

    async def _health(self, _: web.Request) -> web.Response:
        draining = self.runtime.is_draining
        status = "draining" if draining else "ready" if self.runtime.ready.is_set() else "starting"
        document = {"status": status, "worker": self.runtime.worker_name}
        return web.json_response(document, status=200 if status == "ready" else 503)

    async def _who(self, _: web.Request) -> web.Response:
        """Answer the bearer of the right token."""
        return web.json_response({"namespace": self.runtime.namespace, "worker": self.runtime.worker_name})

    async def _load_metrics(self, _: web.Request) -> web.Response:
        return web.json_response(self.runtime.load.to_json())

    async def _metrics(self, _: web.Request) -> web.Response:
        runtime = self.runtime
        in_flight = sum(server.in_flight.count for server in self._servers)
        values = {
            **load_gauges(runtime.load),
            f"{GAUGE_PREFIX}inflight_requests": in_flight + runtime.held,
            **runtime.metrics,
        }
        labels = {
            "dynamo_namespace": runtime.namespace,
            "dynamo_component": runtime.component,
            "worker": runtime.worker_name,
        }
        text = metrics.render(values, labels)
        return web.Response(text=text, headers={"Content-Type": metrics.CONTENT_TYPE})


async def _leave_when_revoked(runtime: WorkerRuntime, registration: Registration) -> None:
    await registration.task
    runtime.leave("the lease was revoked")
