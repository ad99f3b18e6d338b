"""The stock engine workers: what a decode, an aggregated and a prefill worker do when they start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynaplan import wiring
from dynaplan.domain.errors import ConfigError
from dynaplan.ports import ObservableEngine
from dynaplan.serving.prefill_puller import CONCURRENT_PREFILLS, PrefillPuller

if TYPE_CHECKING:
    from dynaplan.ports import Engine
    from dynaplan.runtime.process import WorkerRuntime


async def start_decode_worker(runtime: WorkerRuntime) -> Engine:
    """Start the configured engine and serve its OpenAI API: for decode and for aggregated workers.

    Draining, the requests in flight finish first and the engine stops last.
    """
    engine = await _start_engine(runtime, "decode")
    runtime.on_stop(engine.stop)
    return engine


async def start_prefill_worker(runtime: WorkerRuntime) -> Engine:
    """Start the configured engine and, as soon as this worker is ready, pull from the prefill queue.

    Draining, it stops pulling, finishes and acknowledges what it holds, and waits until its hand-offs
    have been taken or have expired.
    """
    engine = await _start_engine(runtime, "prefill")
    puller = PrefillPuller(
        runtime.messenger,
        engine,
        runtime.clock,
        runtime.namespace,
        runtime.worker_name,
        _most_at_once(runtime),
    )

    async def pull() -> None:
        await runtime.ready.wait()
        await puller.run()

    async def finish() -> None:
        await puller.finish()
        await engine.stop()

    runtime.on_drain(finish)
    runtime.held_requests(lambda: puller.held)
    runtime.spawn(pull(), "prefill queue")
    return engine


async def _start_engine(runtime: WorkerRuntime, role: str) -> Engine:
    engine = wiring.make_engine(
        str(runtime.settings.get("engine", "sim")),
        runtime.settings,
        worker_name=runtime.worker_name,
        address=runtime.url,
        role=role,
    )
    await engine.start()
    runtime.add_routes(engine.routes())
    runtime.set_load(engine.load)
    runtime.describe(**engine.card())
    if isinstance(engine, ObservableEngine):
        runtime.add_metrics(engine.metrics)
        runtime.spawn(engine.died(), "engine")
    return engine


def _most_at_once(runtime: WorkerRuntime) -> int:
    value = runtime.settings.get("max-concurrent-prefills", CONCURRENT_PREFILLS)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        key = f"{runtime.component}.max-concurrent-prefills"
        raise ConfigError(f"{key}: {value!r}", hint="Expected a whole number, 1 or more.")
    return value
