"""An independent etcd client (``etcd3``) and dynaplan understand each other through the store.

Runs where ``etcd3`` 0.12 can be imported, which needs a protobuf older than 4 (``tox -e interop``); skipped
elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from dynaplan.adapters.stores.etcd import EtcdStore
from dynaplan.domain.discovery import Instance
from dynaplan.domain.scaling import DesiredCounts, planner_prefix
from dynaplan.domain.store import Deleted, Put, Snapshot, WatchEvent
from tests.fakes.polling import eventually
from tests.fakes.servers import Server, etcd, runtime_dir  # noqa: F401

with warnings.catch_warnings():
    # Its generated code uses what protobuf 3.20 has deprecated.
    warnings.simplefilter("ignore")
    try:
        import etcd3  # type: ignore[import-not-found]
    except (ImportError, TypeError) as error:  # TypeError: protobuf 4 and later refuse its descriptors
        pytest.skip(f"etcd3 cannot be imported: {error}", allow_module_level=True)

NAMESPACE = "interop"


@pytest.fixture
def client(etcd: Server) -> Iterator[Any]:  # noqa: F811
    """etcd3 on the embedded server's socket: it joins host and port to the gRPC target ``unix:{path}``."""
    path = etcd.environment["ETCD_ENDPOINTS"].removeprefix("unix://")
    host, _, port = path.rpartition(":")
    client = etcd3.client(host=f"unix:{host}", port=port, timeout=5)
    yield client
    client.close()


@pytest.fixture
async def store(etcd: Server) -> AsyncIterator[EtcdStore]:  # noqa: F811
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


async def test_it_reads_our_registrations(client: Any, store: EtcdStore) -> None:
    instance = await registered(store)
    ((value, metadata),) = await asyncio.to_thread(lambda: list(client.get_prefix(f"/services/{NAMESPACE}/")))
    assert metadata.key.decode() == f"/services/{NAMESPACE}/VllmWorker/generate/{instance.instance_id:x}"
    document = json.loads(value)
    assert document["transport"] == {"http": "http://127.0.0.1:1"}
    assert document["instance_id"] == instance.instance_id
    assert metadata.lease_id == instance.instance_id


async def test_a_lease_that_it_revokes_takes_the_worker_out_of_discovery(
    client: Any, store: EtcdStore
) -> None:
    instance = await registered(store)
    reader = await Reader(store, f"/services/{NAMESPACE}/").started()
    assert list(reader.keys) == [instance.key]
    await asyncio.to_thread(client.revoke_lease, instance.instance_id)
    await eventually(lambda: not reader.keys)
    assert await store.keep_alive(instance.instance_id) == 0.0
    await reader.stop()


async def test_the_counts_that_it_writes_are_the_counts_desired(client: Any, store: EtcdStore) -> None:
    reader = await Reader(store, planner_prefix(NAMESPACE)).started()
    counts = {"num_prefill_workers": "2", "num_decode_workers": "3", "decision_id": "7"}
    puts = [client.transactions.put(planner_prefix(NAMESPACE) + key, value) for key, value in counts.items()]
    await asyncio.to_thread(client.transaction, compare=[], success=puts, failure=[])
    await eventually(lambda: len(reader.keys) == 3)
    desired = DesiredCounts.from_keys(NAMESPACE, reader.keys)
    assert (desired.num_prefill_workers, desired.num_decode_workers, desired.decision_id) == (2, 3, 7)
    assert desired.is_pending
    await reader.stop()


# Its watching thread ends with an exception when the client is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_it_watches_what_we_write(client: Any, store: EtcdStore) -> None:
    events, cancel = await asyncio.to_thread(client.watch_prefix, planner_prefix(NAMESPACE))
    await store.put(planner_prefix(NAMESPACE) + "scaled_decision_id", "7")
    event = await asyncio.to_thread(next, events)
    assert event.value == b"7"
    await asyncio.to_thread(cancel)
