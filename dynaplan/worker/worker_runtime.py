"""One worker process as its service sees it: what it may use, and what it reports about itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dynaplan.config.settings.servers import LEASE_TTL_S
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.port import EventPlane, Messenger
from dynaplan.graph.lifecycle import Role
from dynaplan.http.routes import Route
from dynaplan.http.tls import ClientTls, ServerTls
from dynaplan.process.identity import LeaseOwner
from dynaplan.store.discovery import Discovery
from dynaplan.store.port import Store
from dynaplan.util.clock import Clock
from dynaplan.util.connection import OnFirstUse
from dynaplan.util.errors import QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks, log_failure

if TYPE_CHECKING:
    from dynaplan.events.component_events import ComponentEvents

EXIT_DRAINED = 0
EXIT_CRASHED = 1
EXIT_CUT = 75
"""Drained, but the deadline cut requests off (``EX_TEMPFAIL``)."""
EXIT_FORCED = 130
"""Forced by a second signal at a terminal: it did not wait for its requests."""


LEASE_REVOKED = "the lease was revoked"
"""The reason of a drain by which a deployment puts one of its workers away, and goes on itself."""


class StopForced(Exception):
    """A second signal at a terminal: end without waiting."""


Finish = Callable[[], Awaitable[None]]


@dataclass(kw_only=True)
class WorkerRuntime:
    """A worker process for its service: the value of ``dynamo_context["runtime"]``.

    ``url`` is the base address of this worker's own HTTP server, certain before it serves. ``settings``
    is the service's configuration, keys in kebab-case as written. ``discovery`` is started. ``ready`` is
    set once this worker serves and is registered. ``gpus`` is its ``resources.gpu``, ``scratch_dir`` the
    deployment's directory in memory for files named ``{worker_name}.*``. ``public_socket`` is bound to the
    public port, and other processes listen on it too; None: this process is to bind the port itself. ``role``
    is the service's, if it has one; ``lease_ttl_s`` the time to live of the lease that it registers under.
    ``network`` is what ``Instance.network`` says of this process; ``is_managed`` is False for one that no
    ``serve`` has started; ``owner`` is this process, as others may watch it. ``server_tls`` is what its
    public port speaks, None for clear text; by ``client_tls`` it verifies components that speak https.
    """

    namespace: str
    component: str
    worker_name: str
    worker_token: str = field(repr=False)
    url: str
    store: Store
    clock: Clock
    discovery: Discovery
    settings: Mapping[str, Any] = field(default_factory=dict)
    connect_messenger: Callable[[], Coroutine[Any, Any, Messenger]] = field(repr=False)
    connect_events: Callable[[], Coroutine[Any, Any, EventPlane]] | None = field(default=None, repr=False)
    gpus: float = 0
    scratch_dir: str = ""
    memory_fraction: float = 0.0
    public_socket: socket.socket | None = field(default=None, repr=False)
    role: Role | None = None
    lease_ttl_s: int = LEASE_TTL_S
    network: str = ""
    is_managed: bool = True
    owner: LeaseOwner | None = None
    server_tls: ServerTls | None = None
    client_tls: ClientTls = True
    is_on_request: bool = False
    is_draining: bool = False
    lingers: bool = field(default=True, init=False)
    """Whether a drain goes on for a moment for those who send requests and have not heard of it."""
    engine_url: str = field(default="", init=False)
    """The base address of the engine's OpenAI API, when that is a server of its own."""
    instance_id: int = field(default=0, init=False)
    """The lease that this worker's registrations live under, or lived last; 0 before the first."""

    routes: list[Route] = field(default_factory=list, init=False)
    card: dict[str, Any] = field(default_factory=dict, init=False)
    finishers: list[Finish] = field(default_factory=list, init=False)
    closers: list[Finish] = field(default_factory=list, init=False)
    _load: Callable[[], WorkerLoad] = field(default=WorkerLoad, init=False)
    _metrics: list[Callable[[], Mapping[str, float]]] = field(default_factory=list, init=False)
    _held: list[Callable[[], int]] = field(default_factory=list, init=False)
    _refreshers: list[Finish] = field(default_factory=list, init=False)
    _tasks: BackgroundTasks = field(init=False)
    _messenger: OnFirstUse[Messenger] = field(init=False)
    _plane: OnFirstUse[EventPlane] = field(init=False)
    _events: ComponentEvents | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._tasks = BackgroundTasks(self._task_failed)
        self._messenger = OnFirstUse(self.connect_messenger)
        self._plane = OnFirstUse(self.connected_plane)
        self.drain_requested: asyncio.Future[str] = loop.create_future()
        self.failed: asyncio.Future[BaseException] = loop.create_future()
        self.ready = asyncio.Event()

    async def messenger(self) -> Messenger:
        """Return the messaging server's client, one per process, connected on first use.

        Raises QueueUnavailable while the server does not answer; the next call tries again.
        """
        return await self._messenger()

    async def events(self) -> ComponentEvents:
        """Return the events of this component, on one connection per process, made on first use.

        Raises QueueUnavailable while the server does not answer; the next call tries again.
        """
        plane = await self._plane()
        if self._events is None:
            from dynaplan.events.component_events import ComponentEvents

            self._events = ComponentEvents(plane, self.namespace, self.component)
            self.add_metrics(self._events.metrics)
        return self._events

    def add_routes(self, routes: Sequence[Route]) -> None:
        """Serve these routes too from the worker's own HTTP server.

        To be called before the start hooks end.
        """
        self.routes.extend(routes)

    def set_load(self, read: Callable[[], WorkerLoad]) -> None:
        """Set the source of ``/load_metrics`` and ``/metrics``.

        ``read`` is called for each request of them.
        """
        self._load = read

    def add_metrics(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Add samples to ``/metrics``: name -> value; a name that ends in ``_total`` is a counter."""
        self._metrics.append(read)

    def describe(self, **card: Any) -> None:
        """Add to the card that travels with the registrations. To be called before the start hooks end."""
        self.card.update(card)

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run in the background while the process lives; an exception in it ends the process, exit code 1."""
        return self._tasks.spawn(coroutine, name)

    def on_drain(self, finish: Finish, *, ends_requests: bool = False) -> None:
        """Await ``finish`` after deregistration.

        The worker is drained when it has returned and nothing is in flight. ``ends_requests``: when it has,
        nobody sends another request, so that nobody is to be told that this worker drains.
        """
        self.finishers.append(finish)
        self.lingers = self.lingers and not ends_requests

    def on_stop(self, close: Finish) -> None:
        """Await ``close`` last, when nothing is in flight any more and the shutdown hooks have run.

        It is awaited however the process ends, also when it fails or never becomes ready, but cancelled when
        it takes too long.
        """
        self.closers.append(close)

    def held_requests(self, count: Callable[[], int], refresh: Finish | None = None) -> None:
        """Count further requests as held, beside those in flight on the worker's own HTTP server.

        ``refresh`` is awaited before they are counted for the proof of a drain.
        """
        self._held.append(count)
        if refresh:
            self._refreshers.append(refresh)

    def leave(self, why: str) -> None:
        """Drain and end this process; ``why`` completes "because ...". Only the first call counts."""
        if not self.drain_requested.done():
            self.drain_requested.set_result(why)

    def fail(self, error: BaseException) -> None:
        """End this process with exit code 1. Only the first call counts."""
        if not self.failed.done():
            self.failed.set_result(error)

    @property
    def is_put_away(self) -> bool:
        """True when this worker leaves a deployment that goes on, which may want it again."""
        return self.drain_requested.done() and self.drain_requested.result() == LEASE_REVOKED

    @property
    def is_forced(self) -> bool:
        """True after a second signal at a terminal: the worker stops without waiting for its requests."""
        return self.failed.done() and isinstance(self.failed.result(), StopForced)

    @property
    def load(self) -> WorkerLoad:
        """The engine's load as this worker would answer it now."""
        return self._load()

    @property
    def held(self) -> int:
        """The requests held besides those in flight on the worker's own HTTP server."""
        return sum(count() for count in self._held)

    async def refresh_held(self) -> None:
        """Bring the counts of ``held`` up to date."""
        await asyncio.gather(*(refresh() for refresh in self._refreshers))

    @property
    def metrics(self) -> dict[str, float]:
        """The samples that the service added."""
        return {name: value for read in self._metrics for name, value in read().items()}

    async def close(self) -> None:
        """End the background tasks and the connections that were made on use."""
        await self._tasks.cancel()
        await self._plane.close()
        await self._messenger.close()

    async def connected_plane(self) -> EventPlane:
        """Return a new connection to the event plane; raises QueueUnavailable where none is wired."""
        if self.connect_events is None:
            raise QueueUnavailable("this process has no event plane")
        return await self.connect_events()

    def _task_failed(self, task: asyncio.Task[None], error: BaseException) -> None:
        log_failure(task, error)
        self.fail(error)
