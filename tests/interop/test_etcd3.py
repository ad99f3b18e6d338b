"""An independent etcd client (``etcd3``) and dynaplan understand each other through the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import pytest

from dynaplan.contract.store_keys import DesiredCounts, planner_prefix
from dynaplan.store.buckets import Bucket
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.instances import Instance
from dynaplan.store.locks import Locks
from dynaplan.store.model import Deleted, Put, Snapshot, WatchEvent
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import LockLost
from tests.fakes.polling import eventually
from tests.fakes.servers import Server
from tests.interop.conftest import Etcd3

NAMESPACE = "interop"


@pytest.fixture
def client(connect_etcd3: Callable[[str], Etcd3], etcd: Server) -> Etcd3:
    return connect_etcd3(etcd.environment["ETCD_ENDPOINTS"])


@pytest.fixture
async def store(etcd: Server) -> AsyncIterator[EtcdStore]:
    store = EtcdStore.from_environment(etcd.environment)
    yield store
    await store.close()


async def registered(store: EtcdStore) -> Instance:
    """What a worker does when it can serve: its registration, under its lease."""
    lease = await store.grant(10)
    instance = Instance(
        NAMESPACE, "VllmWorker", "generate", lease, "http://127.0.0.1:1", "interop_VllmWorker", 1
    )
    await store.put(instance.key, instance.to_json(), lease)
    return instance


class Reader:
    """Reads a watch, as the routers and the fleet plugin do."""

    def __init__(self, store: EtcdStore, prefix: str) -> None:
        self.keys: dict[str, str] = {}
        self.is_started = False
        self._task = asyncio.create_task(self._read(store.watch(prefix)))

    async def _read(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            match event:
                case Snapshot(items):
                    self.keys = {item.key: item.value for item in items}
                    self.is_started = True
                case Put(item):
                    self.keys[item.key] = item.value
                case Deleted(key):
                    self.keys.pop(key, None)

    async def started(self) -> Reader:
        await eventually(lambda: self.is_started)
        return self

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_it_reads_our_registrations(client: Etcd3, store: EtcdStore) -> None:
    instance = await registered(store)
    (found,) = await asyncio.to_thread(client.call, "get_prefix", f"/services/{NAMESPACE}/")
    assert found["key"] == f"/services/{NAMESPACE}/VllmWorker/generate/{instance.instance_id:x}"
    document = json.loads(found["value"])
    assert document["transport"] == {"http": "http://127.0.0.1:1"}
    assert document["instance_id"] == instance.instance_id
    assert found["lease"] == instance.instance_id


async def test_a_lease_that_it_revokes_takes_the_worker_out_of_discovery(
    client: Etcd3, store: EtcdStore
) -> None:
    instance = await registered(store)
    reader = await Reader(store, f"/services/{NAMESPACE}/").started()
    assert list(reader.keys) == [instance.key]
    await asyncio.to_thread(client.call, "revoke", instance.instance_id)
    await eventually(lambda: not reader.keys)
    assert await store.keep_alive(instance.instance_id) == 0.0
    await reader.stop()


async def test_the_counts_that_it_writes_are_the_counts_desired(client: Etcd3, store: EtcdStore) -> None:
    reader = await Reader(store, planner_prefix(NAMESPACE)).started()
    counts = {"num_prefill_workers": "2", "num_decode_workers": "3", "decision_id": "7"}
    keys = {planner_prefix(NAMESPACE) + name: value for name, value in counts.items()}
    assert await asyncio.to_thread(client.call, "put_together", keys)
    await eventually(lambda: len(reader.keys) == 3)
    desired = DesiredCounts.from_keys(NAMESPACE, reader.keys)
    assert (desired.num_prefill_workers, desired.num_decode_workers, desired.decision_id) == (2, 3, 7)
    assert desired.is_pending
    await reader.stop()


async def test_it_watches_what_we_write(client: Etcd3, store: EtcdStore) -> None:
    key = planner_prefix(NAMESPACE) + "scaled_decision_id"
    await asyncio.to_thread(client.call, "watch", planner_prefix(NAMESPACE))
    await store.put(key, "7")
    event = await asyncio.to_thread(client.call, "next_event")
    assert event == {"key": key, "value": "7", "event": "PutEvent"}


async def test_it_reads_and_writes_our_buckets(client: Etcd3, store: EtcdStore) -> None:
    bucket = Bucket(store, "v1/things")
    await bucket.put("a/b", b"ours")
    (found,) = await asyncio.to_thread(client.call, "get_prefix", "v1/things/")
    assert (found["key"], found["value"]) == ("v1/things/a/b", "ours")
    assert await asyncio.to_thread(client.call, "put_together", {"v1/things/c": "theirs"})
    assert (await bucket.list())["c"].value == b"theirs"


async def test_it_sees_our_lock_and_breaks_it(client: Etcd3, store: EtcdStore) -> None:
    locks = Locks(store, SystemClock(), 10)
    with pytest.raises(LockLost):
        async with await locks.write_lock_with_wait("models/llama") as lock:
            (found,) = await asyncio.to_thread(client.call, "get_prefix", "v1/models/llama/")
            assert found["key"] == "v1/models/llama/writer"
            await asyncio.to_thread(client.call, "revoke", found["lease"])
            await eventually(lambda: not lock.is_held)
    assert await asyncio.to_thread(client.call, "put_together", {"v1/models/llama/writer": "somebody"})
    assert await locks.try_read_lock("models/llama") is None
