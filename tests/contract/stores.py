"""The key-value stores under the contract: how each is opened, what each cannot promise, and a watch to read.

A backend is added by an entry in ``BACKENDS`` and, where it falls short, one in ``LACKS``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from pathlib import Path

import pytest

from dynaplan.kubernetes.store import ClusterStore
from dynaplan.kubernetes.store_documents import PodIdentity
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.file_store import FileStore
from dynaplan.store.memory import MemoryStore
from dynaplan.store.model import Put, Snapshot, WatchEvent
from dynaplan.store.nats_store import NatsStore
from dynaplan.store.port import Store
from dynaplan.util.clock import SystemClock
from tests.fakes.kube_api import KubeApi
from tests.fakes.polling import eventually
from tests.fakes.servers import Server

EVERY_CHANGE = "a watch tells every value, also one that is replaced at once"
ONE_REVISION = "all that a transaction writes has one revision"
OTHER_CLIENTS = "another client reads and changes the same data"
LEASES_OUTLIVE = "a lease lives on when its client has closed the store"
LARGE_DATA = "megabytes of values have room"
FRESH_LEASES = "a renewal knows at once that its lease has been revoked, also where the lease is watched"


async def _memory(_request: pytest.FixtureRequest, _directory: Path) -> Callable[[], Store]:
    store = MemoryStore(SystemClock())
    return lambda: store


async def _etcd(request: pytest.FixtureRequest, _directory: Path) -> Callable[[], Store]:
    server: Server = request.getfixturevalue("shared_etcd")
    await _emptied(store := EtcdStore.from_environment(server.environment))
    await store.close()
    return lambda: EtcdStore.from_environment(server.environment)


async def _file(_request: pytest.FixtureRequest, directory: Path) -> Callable[[], Store]:
    return lambda: FileStore.from_environment({"DYN_FILE_KV": str(directory / "kv")})


async def _nats(request: pytest.FixtureRequest, _directory: Path) -> Callable[[], Store]:
    server: Server = request.getfixturevalue("shared_nats")
    await _emptied(store := NatsStore.from_environment(server.environment))
    await store.close()
    return lambda: NatsStore.from_environment(server.environment)


async def _kubernetes(_request: pytest.FixtureRequest, _directory: Path) -> Callable[[], Store]:
    api = KubeApi()
    api.holds_watches = True
    return lambda: ClusterStore(api.client(), PodIdentity("pod", "uid-of-pod"))


BACKENDS: dict[str, Callable[[pytest.FixtureRequest, Path], Awaitable[Callable[[], Store]]]] = {
    "memory": _memory,
    "etcd": _etcd,
    "file": _file,
    "nats": _nats,
    "kubernetes": _kubernetes,
}
"""Backend -> what makes its data empty and returns a way to connect to it."""

LACKS: dict[str, frozenset[str]] = {
    "memory": frozenset({OTHER_CLIENTS, LEASES_OUTLIVE}),
    "nats": frozenset({EVERY_CHANGE, ONE_REVISION}),
    "kubernetes": frozenset({LARGE_DATA, FRESH_LEASES}),
}
"""Backend -> promises that it does not make."""


async def _emptied(store: Store) -> None:
    for item in await store.list(""):
        await store.delete(item.key)


class Watched:
    """A watch that is being read, and what it has told so far."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.events: list[WatchEvent] = []
        self.task = asyncio.create_task(self._read(store.watch(prefix)))

    async def _read(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            self.events.append(event)

    @property
    def state(self) -> dict[str, str]:
        """What a reader that follows the events believes."""
        state: dict[str, str] = {}
        for event in self.events:
            if isinstance(event, Snapshot):
                state = {item.key: item.value for item in event.items}
            elif isinstance(event, Put):
                state[event.item.key] = event.item.value
            else:
                state.pop(event.key, None)
        return state

    @property
    def puts(self) -> list[str]:
        return [event.item.value for event in self.events if isinstance(event, Put)]

    @property
    def key_puts(self) -> list[tuple[str, str]]:
        return [(event.item.key, event.item.value) for event in self.events if isinstance(event, Put)]

    @property
    def snapshots(self) -> int:
        return sum(isinstance(event, Snapshot) for event in self.events)

    async def reaches(self, state: dict[str, str]) -> None:
        await eventually(lambda: self.state == state)

    async def reaches_among(self, keys: Container[str], state: dict[str, str]) -> None:
        """As ``reaches``, whatever other keys there are."""
        await eventually(lambda: {key: value for key, value in self.state.items() if key in keys} == state)

    async def started(self) -> Watched:
        await eventually(lambda: self.snapshots)
        return self

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
