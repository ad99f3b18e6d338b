"""The planner on its own, over a real etcd and a real NATS server; the test plays the supervisor."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.store_keys import DesiredCounts, fleet_key, planner_prefix
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events import event_connections
from dynaplan.events.prefill_requests import prefill_stream
from dynaplan.planner.assembly import planner_log_root, run_planner
from dynaplan.planner.recorders.decision_log import recent_records
from dynaplan.store import connections
from dynaplan.store.instances import Instance
from tests.fakes.polling import eventually

SETTINGS = PlannerSettings.from_options(
    {"namespace": "ns", "adjustment-interval": 0.4, "metric-pulling-interval": 0.1}
)


class Worker:
    """A decode worker that tells a load, and is registered."""

    def __init__(self) -> None:
        self.load = WorkerLoad(kv_usage=0.7)
        application = web.Application()
        application.router.add_get("/load_metrics", self._answer)
        self._runner = web.AppRunner(application)

    async def start(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.json_response(self.load.to_json())


@pytest.fixture
async def store(etcd, nats, tmp_path, monkeypatch):
    for name, value in {**etcd.environment, **nats.environment, "DYNAPLAN_LOG_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    store = connections.connect_store()
    yield store
    await store.close()


@pytest.fixture
async def worker(store):
    worker = Worker()
    url = await worker.start()
    for number, component in enumerate(("VllmWorker", "PrefillWorker"), 1):
        instance = Instance("ns", component, "generate", number, url)
        await store.put(instance.key, instance.to_json())
    counts = {"ready": 1}
    document = {"roles": {"decode": counts, "prefill": counts}, "gpus_total": 8}
    await store.put(fleet_key("ns"), json.dumps(document))
    yield worker
    await worker.close()


@pytest.fixture
async def planner(worker):
    task = asyncio.create_task(run_planner(SETTINGS))
    yield task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def desired(store) -> DesiredCounts:
    items = await store.list(planner_prefix("ns"))
    return DesiredCounts.from_keys("ns", {item.key: item.value for item in items})


async def decided(store, expected: DesiredCounts) -> None:
    async def is_so() -> bool:
        return await desired(store) == expected

    await eventually(is_so)


async def test_kv_usage_over_the_threshold_asks_for_a_decode_worker(store, worker, planner):
    worker.load = WorkerLoad(kv_usage=0.95)
    await decided(store, DesiredCounts(1, 2, 0, -1))
    (record,) = [
        each for each in recent_records(planner_log_root(), 9) if each["decision"]["desired"]["decode"] == 2
    ]
    assert record["observation"]["load"]["prefill_queue"] == 0.0


async def test_a_long_prefill_queue_asks_for_a_prefill_worker(store, worker, planner):
    messenger = await event_connections.connect_messenger()
    queue = await messenger.queue(prefill_stream("ns"))
    for _ in range(3):
        await queue.put(b"{}")
    await decided(store, DesiredCounts(2, 1, 0, -1))
    await messenger.close()


async def test_it_goes_on_after_nats_and_etcd_were_away(store, worker, planner, etcd, nats):
    def records() -> int:
        return len(recent_records(planner_log_root(), 1000))

    await eventually(lambda: records() >= 1)
    nats.kill()
    etcd.kill()
    seen = records()
    await eventually(lambda: records() >= seen + 2, 20.0)
    assert not planner.done()
    await asyncio.gather(etcd.start_again(), nats.start_again())
    worker.load = WorkerLoad(kv_usage=0.95)

    async def asks() -> bool:
        return (await desired(store)).num_decode_workers == 2

    await eventually(asks, 20.0)
