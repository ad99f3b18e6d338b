"""A frontend with the real runtime object over the in-memory twins: no etcd, no NATS, no supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from dynaplan.config.frontend import read_settings
from dynaplan.events.port import Messenger
from dynaplan.gateway.server import FrontendServer
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import QueueUnavailable
from dynaplan.webui.routes import make_page
from dynaplan.worker.worker_runtime import WorkerRuntime
from tests.fakes.memory_messenger import MemoryMessenger
from tests.fakes.openai_worker import MODEL, TOKEN, FakeWorker


@dataclass
class Stage:
    """One frontend, its client, and what stands behind it."""

    frontend: FrontendServer
    client: aiohttp.ClientSession
    store: MemoryStore
    messenger: MemoryMessenger
    discovery: Discovery
    runtime: WorkerRuntime
    workers: list[FakeWorker] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.frontend.port}"

    async def worker(
        self, act: str = "answer", card: Mapping[str, Any] | None = None, **options: Any
    ) -> FakeWorker:
        """One more decode worker, registered and known to the frontend; ``card`` is added to its card."""
        worker = FakeWorker(f"ns_VllmWorker_{len(self.workers)}", act=act, **options)
        worker.card |= card or {}
        await worker.start()
        self.workers.append(worker)
        await self.know(await worker.register(self.store, len(self.workers)))
        return worker

    async def know(self, instance: Instance) -> None:
        while not self.discovery.has(instance.key):
            await asyncio.sleep(0)

    async def leave(self, worker: FakeWorker) -> None:
        """The worker is gone from discovery."""
        instance = await worker.register(self.store, self.workers.index(worker) + 1)
        await self.store.delete(instance.key)
        while self.discovery.has(instance.key):
            await asyncio.sleep(0)

    async def post(self, path: str = "/v1/chat/completions", **changes: Any) -> tuple[int, str]:
        """Status and body of one request to its end."""
        async with self.client.post(self.url + path, json=body(path, **changes)) as response:
            return response.status, await response.text()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url + path) as response:
            return response.status, await response.text()

    async def sample(self, name: str) -> float:
        """The sum of the samples of ``/metrics`` whose line begins so; 0 when there is none."""
        _, text = await self.get("/metrics")
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name))


def body(path: str, **changes: Any) -> dict[str, Any]:
    """A request's body with everything it needs."""
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}
        if "chat" in path
        else {"prompt": "The sky is"}
    )
    return {"model": MODEL, **prompt, **changes}


@asynccontextmanager
async def stage(environment: Mapping[str, str] | None = None, **options: Any) -> AsyncIterator[Stage]:
    """A frontend on a free port with these options (``max_local_prefill_length=10`` ...).

    ``models`` are those that are loaded on request.
    """
    clock = SystemClock()
    store = MemoryStore(clock)
    messenger = MemoryMessenger(clock)
    discovery = Discovery(store, "ns")
    await discovery.start()

    async def connect() -> Messenger:
        if options.get("without_messenger"):
            raise QueueUnavailable("there is none", delay_s=0.01)
        return messenger

    runtime = WorkerRuntime(
        namespace="ns",
        component="Frontend",
        worker_name="ns_Frontend",
        worker_token=TOKEN,
        url="",
        store=store,
        clock=clock,
        discovery=discovery,
        connect_messenger=connect,
    )
    models = options.pop("models", ())
    settings = read_settings([("Frontend", options)], {"DYNAMO_PORT": "0", **(environment or {})})
    settings = replace(settings, models=models)
    frontend = FrontendServer(runtime, settings, make_page)
    await frontend.start()
    async with aiohttp.ClientSession() as client:
        here = Stage(frontend, client, store, messenger, discovery, runtime)
        try:
            yield here
        finally:
            for worker in here.workers:
                await worker.stop()
            await frontend.close()
            await runtime.close()
            for worker in here.workers:  # those that came meanwhile
                await worker.stop()
            await discovery.close()
            await store.close()
