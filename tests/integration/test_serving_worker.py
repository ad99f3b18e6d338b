"""A worker whose engine is a server of its own, from outside: how it starts, drains and fails."""

from __future__ import annotations

import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.instances import Instance
from tests.fakes.polling import eventually
from tests.integration.worker_child import TOKEN, Worker, Workers


@dataclass
class Router:
    """What a frontend says about the worker. It copies its worker server: the token, the path, the answer."""

    in_flight: int = 0
    asked: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        self.asked += 1
        return web.json_response({"in_flight": self.in_flight})


@asynccontextmanager
async def router_of(store: EtcdStore, instance: Instance) -> AsyncIterator[Router]:
    """A router that has registered, and answers about this worker only."""
    router = Router()
    app = web.Application()
    app.router.add_post(f"/leaving/{instance.instance_id:x}", router.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    registered = Instance("ns", "Frontend", "health", 7, url, card={"routes_to": "Serving"})
    await store.put(registered.key, registered.to_json())
    try:
        yield router
    finally:
        await runner.cleanup()


def serving(workers: Workers, **settings: float) -> Worker:
    return workers.make("Serving", settings, graph="tests.fakes.serving_graph:Serving")


@asynccontextmanager
async def stream_of(
    session: aiohttp.ClientSession, instance: Instance
) -> AsyncIterator[aiohttp.ClientResponse]:
    """A request on its way in the engine, sent straight to it."""
    async with session.post(f"{instance.openai_url}/v1/completions", json={}) as response:
        assert await response.content.readline()
        yield response


def engine_is_gone(worker: Worker) -> bool:
    pid = re.search(r"the engine is (\d+)", worker.log)[1]  # type: ignore[index]
    return "the engine is stopped" in worker.log and not Path(f"/proc/{pid}").exists()


async def test_the_engine_is_stopped_when_no_router_sends_it_anything_any_more(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = serving(workers)
    instance = await worker.start(store)
    assert instance.engine_url not in ("", instance.url)
    async with router_of(store, instance) as router:
        router.in_flight = 2
        async with stream_of(session, instance) as stream:
            await eventually(lambda: worker.running(session))
            await store.revoke(instance.instance_id)
            await eventually(lambda: "draining: 2 requests held" in worker.log)
            await session.post(f"{instance.openai_url}/finish")
            assert (await stream.read()).endswith(b"data: [DONE]\n\n")
        seen = router.asked
        await eventually(lambda: router.asked > seen + 1)
        assert worker.process.poll() is None
        router.in_flight = 0
        assert await worker.exit_code() == 0
    assert worker.proof.startswith("drained: held 2 requests when told to leave, 2 finished, 0 cut, in ")
    assert engine_is_gone(worker)


async def test_an_engine_that_dies_takes_its_worker_out_of_discovery_and_with_it(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = serving(workers)
    instance = await worker.start(store)
    await session.post(f"{instance.openai_url}/die")

    async def is_unregistered() -> bool:
        return not await store.list("/services/")

    await eventually(is_unregistered, 1)
    assert await worker.exit_code() == 1
    assert engine_is_gone(worker)


async def test_a_worker_tells_that_it_starts_and_leaves_at_once_when_told_to(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = serving(workers, **{"startup-time": 600})
    worker.spawn()
    await eventually(lambda: worker.log_path.exists() and "the engine is" in worker.log)
    url = re.search(r"reports its health at (\S+)", worker.log)[1]  # type: ignore[index]
    async with session.get(f"{url}/health") as response:
        assert (response.status, (await response.json())["status"]) == (503, "starting")
    async with session.get(f"{url}/metrics") as response:
        assert "dynamo_component_num_requests_waiting" in await response.text()
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code(5) == 0
    assert await store.list("/services/") == ()
    assert engine_is_gone(worker)
