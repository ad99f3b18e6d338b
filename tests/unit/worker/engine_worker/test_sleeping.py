"""A worker says that its engine sleeps, under its lease, and wakes it when it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.gateway.routing.sleeping_workers import Sleepers, wish_awake
from dynaplan.store.instances import ASLEEP, WAKE, Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.worker.engine_worker.sleeping import SleepNotice
from tests.fakes.plain_engine import PlainEngine
from tests.fakes.polling import eventually


class SleepyEngine(PlainEngine):
    def __init__(self) -> None:
        self.is_asleep = False
        self.reason = ""

    def load(self) -> WorkerLoad:
        return WorkerLoad(is_asleep=self.is_asleep)

    async def wake(self) -> str:
        self.is_asleep = bool(self.reason)
        return self.reason


class Surroundings:
    """What a worker's runtime gives."""

    def __init__(self) -> None:
        self.namespace = "ns"
        self.clock = SystemClock()
        self.store = MemoryStore(self.clock)
        self.instance_id = 0


@asynccontextmanager
async def noticed(engine: SleepyEngine) -> AsyncIterator[Surroundings]:
    runtime = Surroundings()
    runtime.instance_id = await runtime.store.grant(10)
    notice = asyncio.create_task(SleepNotice(cast(Any, runtime), cast(Any, engine)).run())
    try:
        yield runtime
    finally:
        notice.cancel()
        await asyncio.gather(notice, return_exceptions=True)


async def told(store: MemoryStore) -> dict[str, str]:
    return {item.key: item.value for item in await store.list("v1/ns/")}


async def holds(store: MemoryStore, wanted: dict[str, str]) -> None:
    async with asyncio.timeout(10):
        while await told(store) != wanted:
            await asyncio.sleep(0.01)


async def test_it_says_that_it_sleeps_and_wakes_when_it_is_asked() -> None:
    engine = SleepyEngine()
    async with noticed(engine) as runtime:
        key = ASLEEP.key("ns", runtime.instance_id)
        engine.is_asleep = True
        await holds(runtime.store, {key: ""})
        engine.reason = "it does not want to"
        assert await wish_awake(runtime.store, runtime.store, "ns", runtime.instance_id)
        await holds(runtime.store, {key: "it does not want to"})
        engine.reason = ""
        await runtime.store.put(WAKE.key("ns", runtime.instance_id), "")
        await holds(runtime.store, {})
        assert not engine.is_asleep


async def test_under_a_new_lease_it_says_that_again() -> None:
    engine = SleepyEngine()
    engine.is_asleep = True
    async with noticed(engine) as runtime:
        await holds(runtime.store, {ASLEEP.key("ns", runtime.instance_id): ""})
        before, runtime.instance_id = runtime.instance_id, await runtime.store.grant(10)
        await holds(runtime.store, {ASLEEP.key("ns", runtime.instance_id): ""})
        assert ASLEEP.key("ns", before) not in await told(runtime.store)


async def test_one_sleeper_is_woken_for_all_and_one_that_can_be_first() -> None:
    store, background, now = MemoryStore(SystemClock()), BackgroundTasks(), [0.0]
    sleepers = Sleepers(store, store, "ns", background, lambda: now[0])
    instances = [Instance("ns", "VllmWorker", "generate", number, "") for number in (1, 2, 3)]
    sleepers.follow({ASLEEP.key("ns", 1): "in vain", ASLEEP.key("ns", 2): "", "v1/ns/asleep/?": ""})
    assert [each in sleepers for each in instances] == [True, True, False]
    assert [sleepers.wake_one(instances[:2]) for _ in range(3)] == [""] * 3
    await eventually(lambda: not len(background))
    assert await told(store) == {WAKE.key("ns", 2): ""}
    await store.delete(WAKE.key("ns", 2))
    assert sleepers.wake_one(instances[:1]) == "in vain"
    now[0] = 6.0
    sleepers.wake_one(instances[:2])
    await eventually(lambda: not len(background))
    assert set(await told(store)) == {WAKE.key("ns", 1), WAKE.key("ns", 2)}
