"""What every source of workers' loads promises; run over HTTP and over the twin in memory."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.planner.metrics.worker_loads import HttpWorkerLoads
from tests.fakes.worker_metrics import MemoryMetrics

LOAD = WorkerLoad(2, 8, 3, 40, 100, 0.4, 0.1)


class InMemory:
    def __init__(self) -> None:
        self.source = MemoryMetrics()

    async def worker(self, load: WorkerLoad) -> str:
        url = f"worker-{len(self.source.by_url)}"
        self.source.by_url[url] = load
        return url

    async def nobody(self) -> str:
        return "nobody"

    async def close(self) -> None:
        await self.source.close()


class OverHttp:
    def __init__(self) -> None:
        self.source = HttpWorkerLoads(timeout_s=0.2)
        self.runners: list[web.AppRunner] = []

    async def serve(self, handler: object) -> str:
        application = web.Application()
        application.router.add_get("/load_metrics", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def worker(self, load: WorkerLoad) -> str:
        async def answer(_: web.Request) -> web.Response:
            return web.json_response(load.to_json())

        return await self.serve(answer)

    async def nobody(self) -> str:
        url = await self.worker(LOAD)
        await self.runners.pop().cleanup()
        return url

    async def close(self) -> None:
        await self.source.close()
        for runner in self.runners:
            await runner.cleanup()


@pytest.fixture(params=[InMemory, OverHttp])
async def workers(request):
    workers = request.param()
    yield workers
    await workers.close()


@pytest.fixture
async def over_http():
    workers = OverHttp()
    yield workers
    await workers.close()


async def test_every_worker_tells_its_own_load(workers):
    urls = [await workers.worker(LOAD), await workers.worker(WorkerLoad(kv_usage=0.9))]
    assert await workers.source.loads(urls) == (LOAD, WorkerLoad(kv_usage=0.9))


async def test_one_that_is_gone_is_none_and_the_others_answer(workers):
    urls = [await workers.nobody(), await workers.worker(LOAD)]
    assert await workers.source.loads(urls) == (None, LOAD)


async def test_nobody_asked_is_nobody_answered(workers):
    assert await workers.source.loads([]) == ()


async def test_what_is_not_a_load_is_none(over_http):
    is_over = asyncio.Event()

    async def hangs(_: web.Request) -> web.Response:
        await is_over.wait()
        return web.Response()

    async def fails(_: web.Request) -> web.Response:
        return web.Response(status=500, text="{}")

    async def babbles(_: web.Request) -> web.Response:
        return web.Response(text="[1, 2")

    async def lists(_: web.Request) -> web.Response:
        return web.json_response([1, 2])

    async def lies(_: web.Request) -> web.Response:
        return web.json_response({"kv_stats": {"gpu_cache_usage_perc": "much"}})

    urls = [await over_http.serve(handler) for handler in (hangs, fails, babbles, lists, lies)]
    assert await over_http.source.loads(urls) == (None,) * 5
    is_over.set()
