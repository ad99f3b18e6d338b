"""The stock engine workers: decode, aggregated and prefill.

``start_decode_worker`` and ``start_prefill_worker`` start the engine and connect it to the worker's life:
load, metrics, card, drain, KV events. Two parts come along:

- **Relay.** An engine's server listens on loopback, and not every engine asks for a key. So a worker that
  other hosts reach takes their requests itself, checks the token, and forwards them: one hop more under each
  piece of an answer, on the worker's own host.
- **Sleep.** A worker whose engine sleeps reports it in the store, and wakes it when somebody asks. One whose
  engine may be put to sleep (``enable-sleep-mode``) does that when the fleet plugin asks, and it is idle.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from dynaplan.config.frontend import routes_by_events
from dynaplan.config.settings.worker import WorkerSettings, engine_of
from dynaplan.engines import registry
from dynaplan.engines.kv_events import CARD_KEY, FOLLOWS
from dynaplan.engines.port import EngineContext
from dynaplan.http.client import Answer, HttpClient, NotConnected
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import Route
from dynaplan.store.instances import (
    ASLEEP,
    PREFILL_WORKER_QUEUE,
    SLEEP,
    SLEEP_FAILED,
    WAKE,
    host_of,
    is_loopback,
)
from dynaplan.store.model import Transaction
from dynaplan.store.prefix_watcher import PrefixWatcher, value_string
from dynaplan.store.timing import STORE_CALL_TIMEOUT_S
from dynaplan.util.errors import PermanentError, TemporaryError
from dynaplan.worker.kv_event_publisher import KvEventPublisher
from dynaplan.worker.prefill_puller import PrefillPuller
from dynaplan.worker.routers import RoutedRequests, RouterPresence
from dynaplan.worker.timing import SLEEP_POLL_S, WAKE_POLL_S

if TYPE_CHECKING:
    from dynaplan.engines.port import Engine
    from dynaplan.worker.worker_runtime import WorkerRuntime


async def start_decode_worker(runtime: WorkerRuntime) -> Engine:
    """Start the configured engine and serve its OpenAI API: for decode and for aggregated workers.

    In a drain the requests in flight finish first, and the engine stops last. An engine with a port of its
    own first waits until no router sends it requests any more; on a worker that other hosts reach it gets
    them through the worker's own server.
    """
    engine = await _start_engine(runtime, "decode")
    if engine.url and not is_loopback(host_of(runtime.url)):
        relay = Relay(engine.url, runtime.worker_token)
        runtime.add_routes(relay.routes())
        runtime.on_stop(relay.close)
        runtime.engine_url = ""
    elif engine.url:
        routed = RoutedRequests(runtime, engine.count_requests, engine.load)
        runtime.held_requests(lambda: routed.held, routed.refresh)
        runtime.on_drain(routed.wait_gone, ends_requests=runtime.is_on_request)
    elif runtime.is_on_request:
        routed = RoutedRequests(runtime, engine.count_requests, engine.load)
        runtime.on_drain(routed.wait_gone, ends_requests=True)
    return engine


async def start_prefill_worker(runtime: WorkerRuntime) -> Engine:
    """Start the configured engine and, as soon as this worker is ready, pull from the prefill queue.

    In a drain it stops pulling, finishes and acknowledges what it holds, and waits until its hand-offs
    have been taken or have expired.
    """
    max_concurrent = WorkerSettings.from_options(runtime.settings).max_concurrent_prefills
    engine = await _start_engine(runtime, "prefill")
    puller = PrefillPuller(
        runtime.messenger,
        engine,
        runtime.clock,
        runtime.namespace,
        runtime.worker_name,
        max_concurrent,
        lane=str(runtime.card.get(PREFILL_WORKER_QUEUE) or ""),
        is_asleep=lambda: engine.load().is_asleep,
        component=runtime.component if runtime.is_on_request else "",
    )

    async def pull() -> None:
        await runtime.ready.wait()
        await puller.run()

    routers = RouterPresence(runtime)

    async def finish() -> None:
        await puller.finish()
        await _stop_engine(engine, routers)

    runtime.on_drain(finish)
    runtime.held_requests(lambda: puller.held)
    runtime.spawn(pull(), "prefill queue")
    return engine


async def _stop_engine(engine: Engine, routers: RouterPresence) -> None:
    """Stop the engine, once its hand-offs have been taken, or no router is left that could take them.

    The answer to a prefill may have been lost with the queue's server: then nobody knows of its hand-off.
    """
    stopping, alone = asyncio.create_task(engine.stop()), asyncio.create_task(routers.wait_gone())
    try:
        await asyncio.wait({stopping, alone}, return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            engine.release_all()
        await stopping
    finally:
        for task in (stopping, alone):
            task.cancel()
        await asyncio.gather(stopping, alone, return_exceptions=True)


async def _start_engine(runtime: WorkerRuntime, role: str) -> Engine:
    settings = WorkerSettings.from_options(runtime.settings)
    context = EngineContext(
        worker_name=runtime.worker_name,
        role=role,
        address=runtime.url,
        token=runtime.worker_token,
        gpus=runtime.gpus,
        scratch_dir=runtime.scratch_dir,
        memory_fraction=runtime.memory_fraction,
    )
    engine = registry.make_engine(engine_of(runtime.settings), runtime.settings, context)

    async def stop() -> None:
        await engine.stop(keeps_cache=runtime.is_put_away)

    runtime.on_stop(stop)  # before the start: it may be interrupted half-way
    publisher = KvEventPublisher(runtime)
    is_publishing = _is_subscribed_to(runtime) and engine.subscribe_kv_events(publisher.changed)
    await engine.start()
    runtime.add_routes(engine.routes())
    runtime.set_load(engine.load)
    slots = engine.load().request_slots
    runtime.describe(
        **{"tensor_parallel": max(1, int(runtime.gpus)), "request_slots": slots, **engine.card()}
    )
    block_tokens = runtime.card.get("kv_block_tokens")
    if is_publishing and block_tokens:
        runtime.describe(**{CARD_KEY: {"block_tokens": block_tokens}})
        runtime.add_routes(publisher.routes())
        runtime.add_metrics(publisher.metrics)
        runtime.spawn(publisher.run(), "KV events")
        if role == "prefill":
            runtime.describe(**{PREFILL_WORKER_QUEUE: runtime.worker_name})
    is_able = registry.engine_kind(engine_of(runtime.settings)).moves_kv_between_hosts
    if settings.kv_network and is_able and not is_loopback(host_of(runtime.url)):
        runtime.describe(kv_network=True)
    runtime.engine_url = engine.url
    runtime.add_metrics(engine.metrics)
    runtime.spawn(engine.wait_for_failure(), "engine")
    reporter = SleepReporter(runtime, engine)
    runtime.spawn(reporter.run(), "sleep")
    for keys in (SLEEP, WAKE) if reporter.can_sleep else ():
        orders = PrefixWatcher(runtime.store, keys.prefix(runtime.namespace), value_string)
        orders.on_change(reporter.changed.set)
        runtime.spawn(orders.run(), f"orders to {keys.name}")
    return engine


def _is_subscribed_to(runtime: WorkerRuntime) -> bool:
    """Tell whether a frontend routes by KV events: by this configuration, or by what a running one says."""
    if routes_by_events(runtime.settings):
        return True
    return any(instance.card.get(FOLLOWS) for instance in runtime.discovery.all())


REQUEST_HEADERS = ("Content-Type", "X-Request-Id")
"""The headers of a request that the engine gets."""

RESPONSE_HEADERS = ("Content-Type",)
"""The headers of an answer that the frontend gets."""


class Relay:
    """Forwards requests to the engine at that address, and streams its answers back."""

    def __init__(self, engine_url: str, token: str) -> None:
        self._engine_url = engine_url
        self._token = token
        self._http: HttpClient | None = None

    def routes(self) -> tuple[Route, ...]:
        """Return the routes of the OpenAI API."""
        return (Route("POST", "/v1/*", self.answer),)

    async def close(self) -> None:
        if self._http:
            await self._http.close()

    async def answer(self, request: Request) -> Response | None:
        """Answer as the engine does; 503 when it cannot be reached, and has not begun with the request.

        When the engine is lost in the midst of the request, so is the frontend's connection.
        """
        self._http = self._http or HttpClient(self._token)
        headers = {name: value for name in REQUEST_HEADERS if (value := request.headers.get(name))}
        url = self._engine_url + request.target
        try:
            with await self._http.send("POST", url, await request.read(), headers) as upstream:
                await _stream_back(request, upstream)
        except NotConnected as error:
            return Response.json({"error": f"the engine does not answer: {error}"}, 503)
        return None


async def _stream_back(request: Request, upstream: Answer) -> None:
    headers = {name: value for name in RESPONSE_HEADERS if (value := upstream.headers.get(name))}
    request.connection.start_stream(request, headers, upstream.status)
    while piece := await upstream.read_some():
        await request.connection.write(piece)
    await request.connection.end_stream()


log = logging.getLogger(__name__)


class SleepReporter:
    """Keeps the key ``asleep`` of this worker's instance, under its lease, as long as its engine sleeps."""

    def __init__(self, runtime: WorkerRuntime, engine: Engine) -> None:
        self._runtime = runtime
        self._engine = engine
        self._routed = RoutedRequests(runtime, engine.count_requests, engine.load)
        self._reason = ""
        self._reported: tuple[str, str] | None = None
        self.can_sleep = bool(runtime.settings.get("enable-sleep-mode"))
        self.changed = asyncio.Event()
        """Set by who knows that it is to sleep or to wake: it looks at once."""

    async def run(self) -> None:
        """Poll, until cancelled, whether the engine sleeps and somebody wants it awake."""
        while True:
            try:
                async with asyncio.timeout(STORE_CALL_TIMEOUT_S):
                    is_wanted = await self._check()
                if is_wanted:
                    await self._wake()
                elif self.can_sleep and not self._reported:
                    await self._sleep_if_asked()
            except (TimeoutError, TemporaryError, PermanentError) as error:
                log.debug("cannot report whether the engine sleeps: %s", error or "no answer")
            try:
                async with asyncio.timeout(WAKE_POLL_S if self._reported else SLEEP_POLL_S):
                    await self.changed.wait()
            except TimeoutError:
                pass
            self.changed.clear()

    async def _check(self) -> bool:
        """Report whether the engine sleeps; return whether it does and somebody wants it awake."""
        namespace, instance_id = self._runtime.namespace, self._runtime.instance_id
        is_asleep = self._engine.load().is_asleep and instance_id != 0
        if not is_asleep:
            self._reason = ""
        wanted = (ASLEEP.key(namespace, instance_id), self._reason) if is_asleep else None
        await self._report(wanted)
        if not is_asleep:
            return False
        key = WAKE.key(namespace, instance_id)
        if await self._runtime.store.get(key) is None:
            return False
        await self._runtime.store.delete(key)
        return True

    async def _report(self, wanted: tuple[str, str] | None) -> None:
        if wanted == self._reported:
            return
        if self._reported and (wanted is None or wanted[0] != self._reported[0]):
            await self._runtime.store.delete(self._reported[0])
            self._reported = None
        if wanted:
            key, reason = wanted
            lease = self._runtime.instance_id
            await self._runtime.store.commit(Transaction(puts={key: reason}, lease=lease))
        log.info("the engine %s", "sleeps" if wanted else "is awake")
        self._reported = wanted

    async def _sleep_if_asked(self) -> None:
        """Put the engine to sleep once it has answered all, if the fleet plugin asks; report a failure."""
        runtime = self._runtime
        key, level = SLEEP.key(runtime.namespace, runtime.instance_id), ""

        async def is_wanted() -> bool:
            nonlocal level
            item = await runtime.store.get(key)
            level = item.value if item else ""
            return item is not None and not level.startswith(SLEEP_FAILED)

        if await self._routed.wait_empty(is_wanted):
            if reason := await self._engine.sleep(level):
                log.warning("the engine cannot sleep: %s", reason)
                failed = Transaction(puts={key: SLEEP_FAILED + reason}, lease=runtime.instance_id)
                await runtime.store.commit(failed)
            self.changed.set()

    async def _wake(self) -> None:
        self._reason = await self._engine.wake()
        if self._reason:
            log.warning("the engine cannot be woken: %s", self._reason)
        self.changed.set()
