"""What ``serve`` says at its end of workers that it has not started."""

from __future__ import annotations

import asyncio

import pytest

from dynaplan.fleet.shutdown import unmanaged_workers
from dynaplan.store import connections
from dynaplan.store.instances import Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock

ALONE = Instance(
    *("box", "VllmWorker", "generate", 7, "http://127.0.0.1:1"),
    worker="box_VllmWorker_gpu1_77",
    pid=77,
    is_managed=False,
)
OWN = Instance("box", "VllmWorker", "generate", 8, "http://127.0.0.1:2", worker="box_VllmWorker", pid=78)


async def test_unmanaged_workers_are_named_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    monkeypatch.setattr(store, "close", lambda: asyncio.sleep(0))
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    await store.put(OWN.key, OWN.to_json())
    await store.put("/services/box/x/y/1", "no registration")
    assert await unmanaged_workers("box") == ""
    await store.put(ALONE.key, ALONE.to_json())
    assert await unmanaged_workers("box") == (
        "Left running, because serve has not started them: box_VllmWorker_gpu1_77 (pid 77)."
    )
    assert await unmanaged_workers("other") == ""


async def test_a_store_that_is_away_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    await store.close()
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    assert await unmanaged_workers("box") == ""
