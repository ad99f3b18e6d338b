"""The Frontend alone: ``python -m tests.bench.data_path.frontend PORT OPTIONS WORKER_PORT ...``.

The real ``FrontendServer`` with its default options and those of a JSON object, over a store in memory in
which the workers are registered: no etcd, no NATS, no supervisor whose processor time would be counted.
"card" in OPTIONS is added to the workers' cards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import uvloop

from dynaplan.config.frontend import read_settings
from dynaplan.events.port import Messenger
from dynaplan.gateway.server import FrontendServer, collect_garbage_seldom
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import QueueUnavailable
from dynaplan.worker.worker_runtime import WorkerRuntime
from tests.bench.data_path.workers import MODEL

CARD = {"model": MODEL, "context_tokens": 131072, "kv_block_tokens": 16, "engine": "vllm"}


async def no_messenger() -> Messenger:
    raise QueueUnavailable("there is none", delay_s=1.0)


async def serve(port: int, options: dict[str, Any], worker_ports: list[int]) -> None:
    card = {**CARD, **options.pop("card", {})}
    clock = SystemClock()
    store = MemoryStore(clock)
    discovery = Discovery(store, "ns")
    await discovery.start()
    for number, each in enumerate(worker_ports):
        url = f"http://127.0.0.1:{each}"
        instance = Instance("ns", "VllmWorker", "generate", number, url, f"worker_{number}", 0, card, url)
        await store.put(instance.key, instance.to_json())
    runtime = WorkerRuntime(
        namespace="ns",
        component="Frontend",
        worker_name="ns_Frontend",
        worker_token="token",
        url="",
        store=store,
        clock=clock,
        discovery=discovery,
        connect_messenger=no_messenger,
    )
    settings = read_settings([("Frontend", options)], {"DYNAMO_PORT": str(port)})
    await FrontendServer(runtime, settings).start()
    collect_garbage_seldom()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), json.loads(sys.argv[2]), [int(each) for each in sys.argv[3:]]))
