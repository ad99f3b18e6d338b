"""The stock engine workers: the start and the drain of decode, aggregated and prefill workers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dynaplan.config.frontend import routes_by_events
from dynaplan.config.settings.worker import KV_NETWORK_ENGINE, WorkerSettings, engine_of
from dynaplan.engines import registry
from dynaplan.engines.kv_events import CARD_KEY, FOLLOWS
from dynaplan.engines.port import EngineContext
from dynaplan.store.instances import PREFILL_WORKER_QUEUE, host_of, is_loopback
from dynaplan.worker.engine_worker.kv_events import KvEventPublisher
from dynaplan.worker.engine_worker.prefill_puller import PrefillPuller
from dynaplan.worker.engine_worker.relay import Relay
from dynaplan.worker.engine_worker.sleeping import SleepNotice
from dynaplan.worker.routers import RoutedRequests, RoutersWatch

if TYPE_CHECKING:
    from dynaplan.engines.port import Engine
    from dynaplan.worker.process import WorkerRuntime


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
        runtime.held_requests(lambda: routed.held, routed.look)
        runtime.on_drain(routed.gone)
    return engine


async def start_prefill_worker(runtime: WorkerRuntime) -> Engine:
    """Start the configured engine and, as soon as this worker is ready, pull from the prefill queue.

    In a drain it stops pulling, finishes and acknowledges what it holds, and waits until its hand-offs
    have been taken or have expired.
    """
    most_at_once = WorkerSettings.from_options(runtime.settings).max_concurrent_prefills
    engine = await _start_engine(runtime, "prefill")
    puller = PrefillPuller(
        runtime.messenger,
        engine,
        runtime.clock,
        runtime.namespace,
        runtime.worker_name,
        most_at_once,
        lane=str(runtime.card.get(PREFILL_WORKER_QUEUE) or ""),
        is_asleep=lambda: engine.load().is_asleep,
    )

    async def pull() -> None:
        await runtime.ready.wait()
        await puller.run()

    routers = RoutersWatch(runtime)

    async def finish() -> None:
        await puller.finish()
        await _stop_without_orphans(engine, routers)

    runtime.on_drain(finish)
    runtime.held_requests(lambda: puller.held)
    runtime.spawn(pull(), "prefill queue")
    return engine


async def _stop_without_orphans(engine: Engine, routers: RoutersWatch) -> None:
    """Stop the engine, which waits for its hand-offs to be taken; not when every router has gone.

    An answer that was lost with the queue's server leaves a hand-off that no router will take.
    """
    stopping, alone = asyncio.create_task(engine.stop()), asyncio.create_task(routers.gone())
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
    )
    engine = registry.make_engine(engine_of(runtime.settings), runtime.settings, context)
    runtime.on_stop(engine.stop)  # before the start: it may be interrupted half-way
    publisher = KvEventPublisher(runtime)
    is_publishing = _is_followed(runtime) and engine.subscribe_blocks(publisher.changed)
    await engine.start()
    runtime.add_routes(engine.routes())
    runtime.set_load(engine.load)
    runtime.describe(**{"tensor_parallel": max(1, int(runtime.gpus)), **engine.card()})
    block_tokens = runtime.card.get("kv_block_tokens")
    if is_publishing and block_tokens:
        runtime.describe(**{CARD_KEY: {"block_tokens": block_tokens}})
        runtime.add_routes(publisher.routes())
        runtime.add_metrics(publisher.metrics)
        runtime.spawn(publisher.run(), "KV events")
        if role == "prefill":
            runtime.describe(**{PREFILL_WORKER_QUEUE: runtime.worker_name})
    is_able = engine_of(runtime.settings) == KV_NETWORK_ENGINE
    if settings.kv_network and is_able and not is_loopback(host_of(runtime.url)):
        runtime.describe(kv_network=True)
    runtime.engine_url = engine.url
    runtime.add_metrics(engine.metrics)
    runtime.spawn(engine.wait_for_failure(), "engine")
    runtime.spawn(SleepNotice(runtime, engine).run(), "sleep")
    return engine


def _is_followed(runtime: WorkerRuntime) -> bool:
    """Tell whether frontends route by KV events: by the configuration, or one that is there already does."""
    if routes_by_events(runtime.settings):
        return True
    return any(instance.card.get(FOLLOWS) for instance in runtime.discovery.all())
