"""The Frontend's process: builds its parts, listens on the public port, drains and closes.

``request_path`` follows a request through these parts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dynaplan.config.frontend import own_frontend_settings
from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.keys import KeySettings
from dynaplan.config.settings.models import ServedModel
from dynaplan.contract.absence import read_absence
from dynaplan.contract.counts import FleetCounts
from dynaplan.contract.running_limits import running_limits_prefix
from dynaplan.contract.store_keys import fleet_key
from dynaplan.gateway import timing
from dynaplan.gateway.admission import Admission
from dynaplan.gateway.frontend_models import (
    FrontendModel,
    FrontendModels,
    on_demand_model,
    on_demand_settings,
    turns_of,
)
from dynaplan.gateway.kept_connections import KeptConnections, last_words
from dynaplan.gateway.keys.counts import KeyCounts
from dynaplan.gateway.keys.keyring import Keyring
from dynaplan.gateway.keys.usage import USAGE_DIRECTORY, KeyUsage
from dynaplan.gateway.kv_routing.router_inputs import FrontendRouterInputs
from dynaplan.gateway.llama_swap_api import LlamaSwapApi
from dynaplan.gateway.metrics import FrontendMetrics
from dynaplan.gateway.model_queue import DemandPublisher
from dynaplan.gateway.model_routes import ModelRoutes
from dynaplan.gateway.prefill.remote_prefill import RemotePrefill
from dynaplan.gateway.recording import TrafficRecording
from dynaplan.gateway.reports import Reports
from dynaplan.gateway.request_path import RequestPath
from dynaplan.gateway.routes import DeploymentMetricsPort, FrontendRoutes
from dynaplan.gateway.routing.reservation import Reservations
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers
from dynaplan.gateway.routing.stalled_workers import StalledWorkers
from dynaplan.gateway.routing.worker_router import FleetStatus, WorkerRouter
from dynaplan.gateway.upstream import Upstream
from dynaplan.http.accept_shares import AcceptShares
from dynaplan.http.limits import ConnectionLimits
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import ROUTING_PATH, TURNS_PATH, Route
from dynaplan.http.server import Handler, HttpServer
from dynaplan.http.stream_batching import StreamBatch
from dynaplan.process.connection_keeper import KEEPER_VARIABLE
from dynaplan.routing.routing_logic import KV_MODE
from dynaplan.store.instances import PUBLIC_URL, SLEEP, host_of, is_loopback
from dynaplan.store.prefix_watcher import PrefixWatcher, value_string
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import UserError
from dynaplan.util.sockets import bound_socket, url_of
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.worker.routers import ROUTES_TO

if TYPE_CHECKING:
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)


HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""By an address of all networks the one by which this machine reaches itself."""


class Page(Protocol):
    """A web page that the frontend serves beside the API, below ``/ui``."""

    async def handle(self, request: Request) -> Response | None:
        """Answer a request below the page's path, as the server's ``Handler``."""
        ...

    async def close(self) -> None:
        """End what open pages wait for, so that their connections close."""
        ...


class MakePage(Protocol):
    """Makes the page of a frontend. ``chat`` answers a chat request as any client's."""

    def __call__(self, runtime: WorkerRuntime, settings: FrontendSettings, chat: Handler) -> Page | None:
        """Return the page, which is closed with the frontend; None where there is none."""
        ...


def no_page(runtime: WorkerRuntime, settings: FrontendSettings, chat: Handler) -> Page | None:
    return None


MAX_NEW_OBJECTS = 20_000
"""Objects made since the garbage collector looked last, less those that are gone, after which it looks again.

It goes through them in some 2 ms.
"""


def collect_garbage_seldom() -> None:
    """Have the garbage collector leave alone what this process has imported, and look seldom at what is new.

    All that is imported stays: to go through it took 40 ms, in which streams stood still. Requests leave
    nothing to the collector: to go through those of 256 streams took a tenth of the frontend's time.
    """
    gc.freeze()
    gc.set_threshold(MAX_NEW_OBJECTS)


async def start_frontend(
    runtime: WorkerRuntime,
    make_page: MakePage = no_page,
    deployment_metrics: DeploymentMetricsPort | None = None,
) -> None:
    """Serve the OpenAI API at ``DYNAMO_HOST:DYNAMO_PORT`` until the process drains; return when it listens.

    A worker that drains posts ``/leaving/{instance id}`` to the process's own loopback server: it gets no new
    request from then on, and the answer tells how many of its requests this frontend still waits for. Workers
    find that server through discovery. Raises ConfigError for a wrong option, OSError when the port is taken.
    """
    settings = own_frontend_settings(runtime.settings)
    frontend = FrontendServer(runtime, settings, make_page, deployment_metrics)
    await frontend.start()
    runtime.on_drain(frontend.drain)
    runtime.held_requests(lambda: frontend.in_flight)
    runtime.on_stop(frontend.close)


class FrontendServer:
    """One frontend process. ``start`` it once; ``drain`` finishes what it holds; ``close`` ends the rest."""

    def __init__(
        self,
        runtime: WorkerRuntime,
        settings: FrontendSettings,
        make_page: MakePage = no_page,
        deployment_metrics: DeploymentMetricsPort | None = None,
    ) -> None:
        self._runtime, self._deployment_metrics = runtime, deployment_metrics
        self._owner = KeySettings(name="api-key" if settings.api_key else "page", admin=True)
        self._settings = settings = _with_page_key(settings)
        self.fleet = FleetStatus()
        self._recording = _new_recording(runtime, settings)
        self._metrics = _new_metrics(runtime, settings)
        self._keyring = _new_keyring(runtime, settings, self._metrics)
        self._batch = StreamBatch()
        self._upstream = Upstream(runtime.worker_token, runtime.client_tls, self._batch)
        self._background = BackgroundTasks()
        self._sleeping = SleepingWorkers(
            runtime.store, runtime.namespace, self._background, runtime.clock.now_s
        )
        self._stalled = StalledWorkers(self._upstream, self._sleeping, settings.migration_stall_s)
        routing = on_demand_settings(settings) if settings.models else settings
        self._inputs = FrontendRouterInputs(runtime, routing)
        self._router = self._new_router(routing)
        self.prefill = RemotePrefill(
            runtime,
            settings,
            self._metrics,
            self._background,
            sleeping=self._sleeping,
            reported=self._inputs.reported,
        )
        self._models = self._new_models()
        self._path = self._new_path()
        self._routes = FrontendRoutes(self._path, deployment_metrics)
        self._routes.model_routes = self._new_model_routes()
        self._page = make_page(runtime, settings, self._routes.handle)
        self._routes.page = self._page.handle if self._page else None
        self._server = self._client_server()
        self._kept: KeptConnections | None = None

    def _new_router(self, routing: FrontendSettings) -> WorkerRouter:
        """Return the router of all workers, for a frontend whose models are not loaded on request."""
        return WorkerRouter(
            self._runtime.discovery,
            self._settings.decode_component,
            routing,
            self._inputs,
            fleet=self.fleet,
            sleeping=self._sleeping,
            stalled=self._stalled,
            metrics=self._metrics.router,
            turns=turns_of(self._settings),
            frontends=self._settings.frontends,
        )

    def _new_models(self) -> FrontendModels:
        """Return the models that are loaded on request; without any the one of all workers."""
        settings, inputs = self._settings, self._inputs
        component = settings.decode_component
        only = FrontendModel("", settings, self._router, self.prefill, component=component)
        on_demand, discovery = on_demand_settings(settings), self._runtime.discovery
        return FrontendModels(
            [
                on_demand_model(
                    each,
                    on_demand,
                    discovery,
                    self._prefill_of(each),
                    inputs,
                    self._sleeping,
                    self._stalled,
                )
                for each in settings.models
            ]
            or [only]
        )

    def _prefill_of(self, model: ServedModel) -> RemotePrefill:
        """Return the remote prefill of one of several models: its own where it is disaggregated."""
        if model.prefill is None:
            return self.prefill
        own = replace(
            self._settings,
            disaggregation=self._settings.disaggregation_by_model[model.name],
            prefill_component=model.prefill.component,
        )
        return RemotePrefill(
            self._runtime,
            own,
            self._metrics,
            self._background,
            sleeping=self._sleeping,
            is_one_of_several=True,
        )

    def _new_model_routes(self) -> ModelRoutes:
        runtime = self._runtime
        log_dir = os.environ.get("DYNAPLAN_LOG_DIR")
        swap = LlamaSwapApi(self._path, runtime.namespace, Path(log_dir) if log_dir else None)
        if self._path.models.are_on_demand:
            self._path.reports.keep_recent()
        return ModelRoutes(self._path, runtime.store, runtime.namespace, self._routes.handle, swap)

    def _new_path(self) -> RequestPath:
        settings = self._settings
        reports = Reports(self._metrics, self._recording, logs_requests=settings.access_log)
        return RequestPath(
            settings,
            Admission(settings, self._keyring, self._owner),
            self._models,
            self._upstream,
            Reservations(self._upstream, self._background),
            self._sleeping,
            reports,
        )

    @property
    def in_flight(self) -> int:
        """The number of completion requests that are not answered yet."""
        return self._path.in_flight

    @property
    def port(self) -> int:
        return self._server.address[1]

    async def start(self) -> None:
        """Listen, register the public address, and begin to follow the store's keys."""
        self._runtime.add_routes(
            [
                Route("POST", "/leaving/{instance_id}", self._leaving, is_work=False),
                Route("POST", "/falling_asleep/{instance_id}", self._falling_asleep, is_work=False),
                Route("GET", ROUTING_PATH, self._routing, is_open=True, is_work=False),
                Route("GET", TURNS_PATH, self._turns, is_open=True, is_work=False),
            ]
        )
        settings = self._settings
        self._inputs.start()
        listen_on = self._runtime.public_socket
        listen_on = listen_on or bound_socket(settings.host, settings.port, is_shared=True)
        shares = AcceptShares(_shared_directory(settings, "connections"))
        if (keeper := os.environ.get(KEEPER_VARIABLE)) and not self._runtime.server_tls:
            host, port = listen_on.getsockname()[:2]  # what TLS needs to go on dies with this process
            self._kept = KeptConnections(keeper, (HERE.get(host, host), port))
            self._server.keep = self._kept.keep
        self._server.listen(listen_on, shares=shares, tls=self._runtime.server_tls)
        log.info("the OpenAI API is at %s", self._public_url())
        self._runtime.spawn(
            self._stalled.watch(
                lambda: [each.router.instances for each in self._models.all],
                lambda instance: not self._path.api_of(instance).is_unknown,
            ),
            "watch for workers that stand still",
        )
        self._runtime.describe(**{ROUTES_TO: self._models.routes_to, PUBLIC_URL: self._public_url()})
        if self._models.are_on_demand:
            self._runtime.spawn(DemandPublisher(self._runtime, self._models.all).run(), "demand for models")
        if self._recording:
            self._runtime.spawn(self._recording.run(), "record traffic")
        if self._keyring:
            self._runtime.spawn(self._keyring.follow(), "follow keys")
            self._runtime.spawn(self._keyring.usage.run(), "write usage of keys")
        self._follow(fleet_key(self._runtime.namespace), self._read_fleet, "follow fleet")
        limits = running_limits_prefix(self._runtime.namespace)
        self._follow(limits, partial(self._models.follow_running_limits, limits), "follow running limits")
        self._follow(self._sleeping.prefix, self._sleeping.follow, "follow sleeping")
        if self._models.are_on_demand:
            orders = SLEEP.prefix(self._runtime.namespace)
            self._follow(orders, self._sleeping.follow_orders, "follow orders to sleep")
        for prefill in self._models.remote_prefills:
            if prefill.is_on:
                self._follow(prefill.live_prefix, prefill.configure, "follow disaggregation settings")
                self._runtime.spawn(prefill.connect(), "connect prefill queue")

    def _follow(self, prefix: str, changed: Callable[[Mapping[str, str]], None], name: str) -> None:
        """Call ``changed(key -> value)`` with all keys under the prefix, now and after every change."""
        watcher = PrefixWatcher(self._runtime.store, prefix, value_string)
        watcher.on_change(lambda: changed(watcher.current))
        self._runtime.spawn(watcher.run(), name)

    async def drain(self) -> None:
        """Accept no new connection; return when every answer has been given to the kernel.

        A client that has not seen "Connection: close" may send its next request on the connection of its last
        one, just before that would be closed: it is answered, with that header.
        """
        self._routes.is_draining = self._server.is_draining = True
        await self._server.stop_listening()
        if self._page:
            await self._page.close()
        limited = self._server.limited
        while limited.close_idle(timing.DRAIN_NEXT_REQUEST_S) or self.in_flight or limited.has_unsent_bytes():
            await asyncio.sleep(timing.DRAIN_POLL_S)
        await self._server.sent()

    async def close(self) -> None:
        """Close every connection, after releasing the hand-offs at the prefill workers."""
        for prefill in self._models.remote_prefills:
            await prefill.close()
        if self._page:
            await self._page.close()
        await self._server.close()
        if self._kept:
            self._kept.close()
        self._metrics.write()  # at once: a forced stop may cut what follows
        if self._recording:
            await self._recording.write()
        if self._keyring:
            self._keyring.close()
        await self._background.finish(timing.BACKGROUND_TIMEOUT_S)
        await self._path.close()
        if self._deployment_metrics:
            await self._deployment_metrics.close()
        await self._inputs.close()
        await self._upstream.close()

    async def _leaving(self, request: Request) -> Response:
        """Answer ``POST /leaving/{instance id}``: route nothing more there; return what is in flight."""
        return Response.json({"in_flight": self._models.stop_routing_to(_instance_id(request))})

    async def _falling_asleep(self, request: Request) -> Response:
        """Answer ``POST /falling_asleep/{instance id}``: return what is in flight there.

        409 until this frontend has heard that the instance is to sleep: it may send requests there.
        """
        instance_id = _instance_id(request)
        if not self._sleeping.is_to_sleep(instance_id):
            return Response.json({"error": "it is not known here that this worker is to sleep"}, status=409)
        return Response.json({"in_flight": self._models.in_flight_at(instance_id)})

    async def _routing(self, request: Request) -> Response:
        """Answer ``GET /routing``: by worker, the source of its cached prefixes."""
        return Response.json(self._router.cache_sources())

    async def _turns(self, request: Request) -> Response:
        """Answer ``GET /turns``: what each key has at each model, and what it uses of its limits."""
        turns = {
            each.name: [asdict(key) for key in each.router.turns.of_keys()]
            for each in self._models.all
            if each.router.turns
        }
        used = self._keyring.limits_used() if self._keyring else {}
        limits = {name: [each._asdict() for each in all_of] for name, all_of in used.items()}
        return Response.json({"turns": turns, "limits": limits})

    def _client_server(self) -> HttpServer:
        settings = self._settings
        limits = ConnectionLimits(
            settings.max_connections,
            settings.idle_timeout_s,
            settings.write_timeout_s,
            settings.head_timeout_s,
        )
        return HttpServer(
            self._routes.handle,
            limits,
            closed=self._metrics.count_closed_connection,
            batch=self._batch,
            readable_by=self._routes.readable_by,
            failed=self._routes.failed,
            last_words=last_words,
        )

    def _public_url(self) -> str:
        """Return the URL of the public server, as seen from this machine, or from others that see it."""
        host, port = self._server.address
        own = host_of(self._runtime.url).strip("[]")
        seen = HERE if is_loopback(own) else dict.fromkeys(HERE, own)
        host = seen.get(host, host)
        return url_of(host, port, is_tls=self._runtime.server_tls is not None)

    def _read_fleet(self, keys: Mapping[str, str]) -> None:
        fleet = keys.get(fleet_key(self._runtime.namespace), "")
        self.fleet.is_worker_starting = _has_starting_decode_workers(fleet)
        self.fleet.absence = read_absence(fleet, self._settings.decode_component)
        self._models.follow_fleet(fleet)


def _new_metrics(runtime: WorkerRuntime, settings: FrontendSettings) -> FrontendMetrics:
    # Not the loop's time: uvloop's stands still while it runs callbacks, and has milliseconds only.
    shared = Path(settings.shared_metrics) if settings.shared_metrics else None
    by_prefix = settings.decode_component if settings.router == KV_MODE else ""
    return FrontendMetrics(
        runtime.namespace,
        runtime.clock.now_s,
        shared,
        by_prefix,
        settings.promised_ms,
        asyncio.get_running_loop().call_later if shared else None,
        settings.promised_ms_by_model,
        has_keys=bool(settings.api_keys),
    )


def _new_recording(runtime: WorkerRuntime, settings: FrontendSettings) -> TrafficRecording | None:
    file = settings.record_traffic
    return TrafficRecording(Path(file), runtime.clock.now_s) if file else None


def _with_page_key(settings: FrontendSettings) -> FrontendSettings:
    """Return the settings; where keys come only from a file, with a random key for this process's page."""
    if settings.api_keys and not settings.api_key:
        return replace(settings, api_key=secrets.token_urlsafe(32))
    return settings


def _new_keyring(
    runtime: WorkerRuntime, settings: FrontendSettings, metrics: FrontendMetrics
) -> Keyring | None:
    """Return the keys of the settings' file, if there is one; frontends on one port count together."""
    if not settings.api_keys:
        return None
    log_dir = os.environ.get("DYNAPLAN_LOG_DIR")
    usage = KeyUsage(
        runtime.namespace,
        metrics.key_requests,
        metrics.key_tokens,
        Path(log_dir) / USAGE_DIRECTORY if log_dir else None,
    )
    metrics.key_usage = usage
    return Keyring(
        Path(settings.api_keys), KeyCounts(_shared_directory(settings, "frontend-keys"), time.time), usage
    )


def _shared_directory(settings: FrontendSettings, name: str) -> Path | None:
    """Return the directory of what the frontends on one port share; None for one that is alone."""
    return Path(settings.shared_metrics).with_name(name) if settings.shared_metrics else None


def _has_starting_decode_workers(fleet: str) -> bool:
    """Return whether the published fleet has decode workers that are starting or wait for a restart."""
    try:
        decode = FleetCounts.from_json(parse_object(fleet)).decode
    except ValueError:
        return False
    return decode.starting + decode.backoff > 0


def _instance_id(request: Request) -> int:
    """Return the instance id in the request's path, which is hexadecimal; raises UserError."""
    try:
        return int(request.fields["instance_id"], 16)
    except ValueError:
        raise UserError("an instance id is a hexadecimal number") from None
