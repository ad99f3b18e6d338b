"""A worker's life, from its process' start to its exit code, without losing a request.

1. **Start.** The worker's own server answers ``/health`` ("starting", 503), ``/metrics`` and ``/who`` before
   anything else. Then ``prepare`` makes the service and runs its start hooks, which may load an engine for
   minutes.
2. **Serve.** The service's routes are added; with an ``@api`` endpoint the public port opens.
3. **Register.** The instances are put under a lease: from now on routers send requests. ``/health`` says
   "ready".
4. **Run**, until SIGTERM or SIGINT, a revoked lease, the service itself, or a failure of a background task.
   Each of the first three requests a drain, with its reason; one that comes before step 3 is over interrupts
   the start.
5. **Drain.** Refuse new work with a status that makes a router try another worker; count the requests held;
   revoke the lease; wait until they are finished and every ``on_drain`` has returned, no longer than the
   drain deadline; cut the rest. The report is one line of the log.
6. **Stop.** Run the shutdown hooks, then every ``on_stop``, which is where an engine ends. A failed worker
   skips 5, and so does a second SIGINT at a terminal.
7. **Exit.** 0 drained, 75 drained with requests cut, 130 forced, 1 failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from dynaplan.engines.worker_load import GAUGE_PREFIX, load_gauges
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import Route
from dynaplan.process.signals import on_signals
from dynaplan.store.instances import Instance
from dynaplan.store.registration import Registration
from dynaplan.util import prometheus_text
from dynaplan.worker.endpoints import ServedEndpoint, check_route, internal_route, public_route
from dynaplan.worker.server import WorkerServer
from dynaplan.worker.timing import (
    COUNT_HELD_TIMEOUT_S,
    DRAIN_LINGER_S,
    HELD_POLL_S,
    SHUTDOWN_HOOKS_TIMEOUT_S,
    STOP_TIMEOUT_FAILED_S,
    STOP_TIMEOUT_MIN_S,
    STOP_TIMEOUT_S,
)
from dynaplan.worker.worker_runtime import (
    EXIT_CRASHED,
    EXIT_CUT,
    EXIT_DRAINED,
    EXIT_FORCED,
    LEASE_REVOKED,
    Finish,
    StopForced,
    WorkerRuntime,
)

log = logging.getLogger(__name__)

WHO_PATH = "/who"
"""The route that returns the worker's name to a bearer of the namespace's token, and 401 to others."""


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
class WorkerLifecycle:
    """Runs one worker from its start hooks to its exit code.

    ``server`` is the worker's own HTTP server; ``public`` makes the one for ``@api`` endpoints, and is
    called only when there are any. ``has_signals``: SIGTERM and SIGINT drain this worker; False where the
    process has several, and requests their drains itself. ``is_in_foreground``: a second signal forces the
    exit.
    """

    runtime: WorkerRuntime
    server: WorkerServer
    public: Callable[[], WorkerServer]
    drain_deadline_s: float
    has_signals: bool = True
    is_in_foreground: bool = False
    _servers: list[WorkerServer] = field(default_factory=list, init=False)
    _prepared: HostedService = field(default_factory=HostedService, init=False)

    async def run(self, prepare: Callable[[], Awaitable[HostedService]]) -> int:
        """Run to the end and return the exit code. Raises what ``prepare`` raises.

        Cancelling it cuts the requests off that are still held.
        """
        runtime = self.runtime
        registration = self._registration()
        with on_signals(self._on_signal) if self.has_signals else nullcontext():
            try:
                await self._wait_for_end(asyncio.create_task(self._start(prepare, registration)))
                return await self._drain_and_exit(registration)
            except asyncio.CancelledError:
                await registration.deregister(1.0)
                raise
            finally:
                await close(runtime, STOP_TIMEOUT_FAILED_S)
                for server in {self.server, *self._servers}:
                    await server.stop()

    def _on_signal(self, name: str) -> None:
        if self.is_in_foreground and self.runtime.drain_requested.done():
            self.runtime.fail(StopForced())
        self.runtime.leave(f"{name} arrived")

    async def _wait_for_end(self, starting: asyncio.Task[None]) -> None:
        """Start, and run until the end is requested, which may be before the start is done."""
        endings: set[asyncio.Future[Any]] = {self.runtime.drain_requested, self.runtime.failed}
        try:
            await asyncio.wait({starting, *endings}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    async def _start(
        self, prepare: Callable[[], Awaitable[HostedService]], registration: Registration
    ) -> None:
        await self._serve(self.server, self._health_routes())
        log.info("starting: %s reports its health at %s", self.runtime.worker_name, self.runtime.url)
        self._prepared = prepared = await prepare()
        self.server.add([*self._service_routes(), *map(internal_route, prepared.endpoints)])
        public = [public_route(endpoint) for endpoint in prepared.endpoints if endpoint.is_public]
        if public:
            await self._serve(self.public(), public)
        await registration.start()
        self.runtime.ready.set()
        self.runtime.spawn(_drain_when_revoked(self.runtime, registration), "registration")
        log.info("ready: %s serves %s at %s", self.runtime.worker_name, prepared.registered, self.runtime.url)

    async def _drain_and_exit(self, registration: Registration) -> int:
        runtime = self.runtime
        if not runtime.failed.done():
            report = await drain(
                runtime, self._servers, registration, self._prepared.shutdown_hooks, self.drain_deadline_s
            )
            if not runtime.failed.done():
                return EXIT_CUT if report.cut else EXIT_DRAINED
        await registration.deregister(1.0)
        if runtime.is_forced:
            log.warning("stopped by force: not waiting for the requests held")
            return EXIT_FORCED
        log.error("this worker failed: %r", runtime.failed.result())
        return EXIT_CRASHED

    async def _serve(self, server: WorkerServer, routes: Sequence[Route]) -> None:
        await server.start(routes)
        self._servers.append(server)

    def _registration(self) -> Registration:
        runtime = self.runtime
        return Registration(
            runtime.store,
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
            for endpoint in self._prepared.registered
        ]

    def _health_routes(self) -> Sequence[Route]:
        """Return the routes that are served before the service has started."""
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

    async def _health(self, _: Request) -> Response:
        draining = self.runtime.is_draining
        status = "draining" if draining else "ready" if self.runtime.ready.is_set() else "starting"
        document = {"status": status, "worker": self.runtime.worker_name}
        return Response.json(document, 200 if status == "ready" else 503)

    async def _who(self, _: Request) -> Response:
        return Response.json({"namespace": self.runtime.namespace, "worker": self.runtime.worker_name})

    async def _load_metrics(self, _: Request) -> Response:
        return Response.json(self.runtime.load.to_json())

    async def _metrics(self, _: Request) -> Response:
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
        text = prometheus_text.render(values, labels)
        return Response.text(text, content_type=prometheus_text.CONTENT_TYPE)


async def _drain_when_revoked(runtime: WorkerRuntime, registration: Registration) -> None:
    await registration.task
    runtime.leave(LEASE_REVOKED)


@dataclass(frozen=True)
class DrainReport:
    """What became of the requests that a worker held when its drain was requested."""

    held: int
    cut: int
    took_s: float
    why: str

    def __str__(self) -> str:
        return (
            f"drained: held {self.held} requests when told to leave, {self.held - self.cut} finished, "
            f"{self.cut} cut, in {self.took_s:.3f} s (because {self.why})"
        )


async def drain(
    runtime: WorkerRuntime,
    servers: Sequence[WorkerServer],
    registration: Registration,
    hooks: Sequence[Callable[[], Any]],
    deadline_s: float,
) -> DrainReport:
    """Refuse new work, deregister, finish the held requests, run the shutdown hooks.

    At the deadline the remaining requests are cut, counted and logged. A failure of the worker itself ends
    the wait too.
    """
    started_s = runtime.clock.now_s()
    runtime.is_draining = True
    for server in servers:
        await server.drain()
    await _run_bounded(COUNT_HELD_TIMEOUT_S, runtime.refresh_held())
    held = _count_held(runtime, servers)
    log.info("draining: %d requests held (because %s)", held, runtime.drain_requested.result())
    await registration.deregister()
    await _run_bounded(deadline_s, _finish(runtime, servers), runtime.failed)
    cut = _count_held(runtime, servers)
    await _run_bounded(SHUTDOWN_HOOKS_TIMEOUT_S, _run_in_order(hooks))
    has_time = runtime.ready.is_set() and not runtime.is_forced
    left_s = started_s + deadline_s - runtime.clock.now_s() if has_time else 0.0
    await close(runtime, min(max(left_s, STOP_TIMEOUT_MIN_S), STOP_TIMEOUT_S))
    # What arrived before every router had heard of the deregistration was held too.
    report = DrainReport(
        max(held, cut), cut, runtime.clock.now_s() - started_s, runtime.drain_requested.result()
    )
    log.log(logging.WARNING if cut else logging.INFO, "%s", report)
    return report


async def close(runtime: WorkerRuntime, seconds: float) -> None:
    """Await the callbacks of ``WorkerRuntime.on_stop``, all at once and each only once.

    Those that take longer than ``seconds`` are cancelled.
    """
    closers, runtime.closers = runtime.closers, []
    await _run_bounded(seconds, _run_together(closers))


def _count_held(runtime: WorkerRuntime, servers: Sequence[WorkerServer]) -> int:
    return runtime.held + sum(server.in_flight.count for server in servers)


async def _finish(runtime: WorkerRuntime, servers: Sequence[WorkerServer]) -> None:
    linger = asyncio.ensure_future(runtime.clock.sleep(DRAIN_LINGER_S if runtime.lingers else 0.0))
    try:
        await _run_together(runtime.finishers)
        await linger
        for server in servers:
            await server.in_flight.wait_idle()
        while runtime.held:
            await runtime.clock.sleep(HELD_POLL_S)
    finally:
        linger.cancel()


async def _run_bounded(
    seconds: float, work: Coroutine[Any, Any, None], stop: asyncio.Future[Any] | None = None
) -> None:
    """Await the work for at most ``seconds``, and only until ``stop`` is done; then cancel it.

    What the work raises is dropped.
    """
    task = asyncio.create_task(work)
    waited_for = {task, stop} if stop else {task}
    try:
        done, _ = await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            log.error("not done within %g s: continuing without", seconds)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run_in_order(hooks: Sequence[Callable[[], Any]]) -> None:
    for hook in hooks:
        await _run_logged(hook)


async def _run_together(hooks: Sequence[Finish]) -> None:
    await asyncio.gather(*map(_run_logged, hooks))


async def _run_logged(hook: Finish | Callable[[], Any]) -> None:
    """Call the hook, sync or async; whatever it raises is logged."""
    try:
        result = hook()
        if inspect.isawaitable(result):
            await result
    except Exception:
        log.exception("%s failed while leaving", getattr(hook, "__qualname__", hook))
