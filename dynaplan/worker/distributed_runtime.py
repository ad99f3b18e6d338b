"""Dynamo's API for programs of a deployment that run no graph: namespaces, components, endpoints, clients.

::

    endpoint = runtime.namespace("vllm-agg").component("backend").endpoint("generate")
    await endpoint.serve(handler)            # until this process is to drain
    client = await endpoint.client()         # in this process or any other

Serving is a worker's life (``worker/lifecycle.py``), the same that a graph's service has: an HTTP server of
its own, a registration under a lease, a drain.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.settings.servers import LEASE_TTL_S
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.events.component_events import ComponentEvents
from dynaplan.events.port import EventPlane, Messenger
from dynaplan.graph.endpoints import request_type_of
from dynaplan.http.client import HttpClient
from dynaplan.http.tls import ClientTls, ServerTls
from dynaplan.process.identity import LeaseOwner
from dynaplan.process.signals import on_signals
from dynaplan.store.buckets import Bucket
from dynaplan.store.discovery import Discovery
from dynaplan.store.locks import Locks
from dynaplan.store.port import Store
from dynaplan.util.clock import Clock
from dynaplan.util.connection import OnFirstUse
from dynaplan.util.errors import ConfigError
from dynaplan.util.sockets import bound_socket
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.worker.endpoint_client import EndpointClient
from dynaplan.worker.endpoints import ServedEndpoint
from dynaplan.worker.lifecycle import HostedService, WorkerLifecycle
from dynaplan.worker.server import WorkerServer, bind_advertised
from dynaplan.worker.worker_runtime import WorkerRuntime

NAME = re.compile(r"[\w.~-]+", re.ASCII)
ENDPOINT_NAME = re.compile(r"[\w.~-]+(/[\w.~-]+)*", re.ASCII)

RequestHandler = Callable[..., Any]
"""Takes one request, or nothing; an async generator of items, or a function that returns one."""


@dataclass(kw_only=True)
class Runtime:
    """A process's connection to a deployment. Made by ``dynaplan.runtime.connect``.

    ``own_namespace`` is the deployment's; any other one of the same store can be used, too. ``token`` is what
    the processes of the deployment show each other. Endpoints are served on a port of ``host``, by which
    other hosts know this one, or of loopback when that is empty, and registered under leases of
    ``lease_ttl_s`` seconds; ``network`` and ``owner`` are what ``Instance`` says of this process. They speak
    https with ``server_tls``; by ``client_tls`` those of others are verified.
    """

    own_namespace: str
    store: Store
    clock: Clock
    token: str = field(repr=False)
    connect_messenger: Callable[[], Coroutine[Any, Any, Messenger]] = field(repr=False)
    connect_events: Callable[[], Coroutine[Any, Any, EventPlane]] = field(repr=False)
    host: str = ""
    network: str = ""
    owner: LeaseOwner | None = None
    drain_deadline_s: float = ProcessSettings.drain_deadline_s
    lease_ttl_s: int = LEASE_TTL_S
    server_tls: ServerTls | None = None
    client_tls: ClientTls = True
    _discoveries: dict[str, OnFirstUse[Discovery]] = field(default_factory=dict, init=False)
    _http: HttpClient | None = field(default=None, init=False)
    _workers: list[WorkerRuntime] = field(default_factory=list, init=False)
    _serving: set[asyncio.Task[Any]] = field(default_factory=set, init=False)
    _watches: BackgroundTasks = field(default_factory=BackgroundTasks, init=False)
    _plane: OnFirstUse[EventPlane] = field(init=False)
    _why: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._plane = OnFirstUse(self.connect_events)

    def namespace(self, name: str = "") -> RuntimeNamespace:
        """Return the namespace of that name, or the deployment's own."""
        return RuntimeNamespace(self, _checked(NAME, "namespace", name or self.own_namespace))

    @property
    def locks(self) -> Locks:
        """The locks that all processes at the same store share."""
        return Locks(self.store, self.clock, self.lease_ttl_s)

    def bucket(self, name: str) -> Bucket:
        """Return the store's bucket of that name, as in ``v1/instances``."""
        return Bucket(self.store, name)

    def leave(self, why: str) -> None:
        """Drain what is served here, now or by a later ``serve``; ``why`` completes "because ..."."""
        self._why = self._why or why
        for worker in self._workers:
            worker.leave(why)

    async def discovery(self, namespace: str) -> Discovery:
        """Return the instances of a namespace, followed from the first call on."""
        if namespace not in self._discoveries:
            self._discoveries[namespace] = OnFirstUse(lambda: self._follow(namespace))
        return await self._discoveries[namespace]()

    async def event_plane(self) -> EventPlane:
        """Return the connection by which events travel, made on first use.

        Raises QueueUnavailable while the server does not answer; the next call tries again.
        """
        return await self._plane()

    @property
    def http(self) -> HttpClient:
        """The HTTP client of this process, whose connections all endpoint clients share."""
        self._http = self._http or HttpClient(self.token, self.client_tls)
        return self._http

    async def serve(self, namespace: str, component: str, endpoints: Sequence[ServedEndpoint]) -> None:
        """Serve the endpoints until a drain is requested and done.

        The same as ``RuntimeComponent.serve``, which says more.
        """
        discovery = await self.discovery(namespace)
        address = bind_advertised(self.host, has_token=True)
        listen_on = address.socket if address else bound_socket("127.0.0.1", 0)
        server = WorkerServer(listen_on, self.token, advertised=self.host, tls=self.server_tls)
        worker = self._worker(namespace, component, server.url, discovery)
        lifecycle = WorkerLifecycle(
            worker, server, _no_public_server, self.drain_deadline_s, has_signals=False
        )

        async def prepare() -> HostedService:
            return HostedService(endpoints=endpoints, registered=[each.name for each in endpoints])

        if self._why:
            worker.leave(self._why)
        with self._counting(worker), on_signals(lambda name: self.leave(f"{name} arrived")):
            try:
                await lifecycle.run(prepare)
            finally:
                await worker.close()
        if worker.failed.done():
            raise worker.failed.result()

    async def close(self) -> None:
        """Drain what is still served, and close every connection, whichever of them fails."""
        self.leave("the program leaves the deployment")
        async with AsyncExitStack() as last_is_first:
            last_is_first.push_async_callback(self._close_http)
            last_is_first.push_async_callback(self._plane.close)
            last_is_first.push_async_callback(self._watches.cancel)
            last_is_first.push_async_callback(self._close_discoveries)
            await asyncio.gather(*(self._serving - {asyncio.current_task()}), return_exceptions=True)

    async def _close_discoveries(self) -> None:
        async with AsyncExitStack() as closing:
            for discovery in self._discoveries.values():
                closing.push_async_callback(discovery.close)

    async def _close_http(self) -> None:
        if self._http:
            await self._http.close()

    @contextmanager
    def _counting(self, worker: WorkerRuntime) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        self._workers.append(worker)
        self._serving.add(task)
        try:
            yield
        finally:
            self._workers.remove(worker)
            self._serving.discard(task)

    async def _follow(self, namespace: str) -> Discovery:
        discovery = Discovery(self.store, namespace, self.network)
        await discovery.start()
        self._watches.spawn(discovery.wait_failed(), f"discovery of {namespace}")
        return discovery

    def _worker(self, namespace: str, component: str, url: str, discovery: Discovery) -> WorkerRuntime:
        return WorkerRuntime(
            namespace=namespace,
            component=component,
            worker_name=f"{namespace}_{component}_{os.getpid()}",
            worker_token=self.token,
            url=url,
            store=self.store,
            clock=self.clock,
            discovery=discovery,
            network=self.network,
            owner=self.owner,
            is_managed=False,
            connect_messenger=self.connect_messenger,
            lease_ttl_s=self.lease_ttl_s,
            client_tls=self.client_tls,
        )


@dataclass(frozen=True)
class RuntimeNamespace:
    """A set of components that find each other: a deployment's, for one."""

    runtime: Runtime
    name: str

    def component(self, name: str) -> RuntimeComponent:
        """Return the component of that name, whether or not anybody serves it."""
        return RuntimeComponent(self, _checked(NAME, "component", name))


@dataclass(frozen=True)
class RuntimeComponent:
    """Endpoints that belong together: each process that serves the component serves them all."""

    namespace: RuntimeNamespace
    name: str

    def endpoint(self, name: str) -> RuntimeEndpoint:
        """Return the endpoint of that name, whether or not anybody serves it."""
        return RuntimeEndpoint(self, _checked(ENDPOINT_NAME, "endpoint", name))

    async def events(self) -> ComponentEvents:
        """Return the component's events, to be published and subscribed to.

        Raises QueueUnavailable while the server does not answer; the next call tries again.
        """
        plane = await self.namespace.runtime.event_plane()
        return ComponentEvents(plane, self.namespace.name, self.name)

    async def serve(self, handlers: Mapping[str, RequestHandler]) -> None:
        """Serve endpoints, name -> handler, as one instance: under one lease, which is its id.

        Returns when they are drained: after SIGTERM or SIGINT, when somebody has revoked the lease, or when
        the program leaves the deployment. New requests are refused then, in a way that makes clients ask
        another instance, and those in flight may take the drain deadline to finish. Cancelling the call cuts
        them off. Raises what made serving impossible.
        """
        for name, handler in handlers.items():
            _check_handler(_checked(ENDPOINT_NAME, "endpoint", name), handler)
        served = [ServedEndpoint(name, each, request_type_of(each)) for name, each in handlers.items()]
        await self.namespace.runtime.serve(self.namespace.name, self.name, served)


@dataclass(frozen=True)
class RuntimeEndpoint:
    """One endpoint of a component: to be served here, and to be called from anywhere."""

    component: RuntimeComponent
    name: str

    async def serve(self, handler: RequestHandler) -> None:
        """Serve this endpoint alone; see ``RuntimeComponent.serve``.

        ``handler`` takes the request as plain data, or as the dataclass or pydantic model that its argument
        is annotated with. It is cancelled when its client leaves or the request's time is over.
        """
        await self.component.serve({self.name: handler})

    async def client(self) -> EndpointClient:
        """Return a client that calls the endpoint's instances, in whatever processes.

        Waits until the instances that are registered now are known, however long the store is away.
        """
        namespace = self.component.namespace
        discovery = await namespace.runtime.discovery(namespace.name)
        return EndpointClient(self.component.name, self.name, discovery, namespace.runtime.http)


def _checked(pattern: re.Pattern[str], what: str, name: str) -> str:
    if not pattern.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of {'an' if what == 'endpoint' else 'a'} {what}",
            hint="Use letters, digits and the characters . _ ~ -",
        )
    return name


def _check_handler(name: str, handler: RequestHandler) -> None:
    if callable(handler) and not inspect.isgeneratorfunction(handler):
        return
    what = "a generator that is not async" if callable(handler) else type(handler).__name__
    raise ConfigError(
        f"the handler of endpoint {name} is {what}",
        hint="Give an async generator function (`async def`, with `yield`) that takes one request.",
    )


def _no_public_server() -> WorkerServer:
    raise AssertionError("a joined process has no public endpoints")
