"""Servers that a module shares, clients of a test's own server, and what contracts are run over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats as nats_py
import pytest
from nats.js.kv import KeyValue

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.nats_store import NatsStore
from dynaplan.store.port import Store
from tests.contract.engine_workers import Worker, starting
from tests.contract.stores import BACKENDS
from tests.fakes.servers import Server, short_directory, start_etcd, start_nats


@pytest.fixture(scope="module")
def shared_etcd() -> Iterator[Server]:
    """A real etcd, to be left as it is."""
    with short_directory() as directory:
        server = start_etcd(directory)
        yield server
        server.kill()


@pytest.fixture(scope="module")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real NATS server, to be left as it is."""
    server = start_nats(tmp_path_factory.mktemp("n"))
    yield server
    server.kill()


@pytest.fixture(params=BACKENDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    """An empty store of each kind."""
    opened = (await BACKENDS[request.param](request, tmp_path))()
    yield opened
    await opened.close()


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    """A simulated engine that takes no time."""
    async with starting(tmp_path) as start_any:
        yield await start_any("sim", {"speedup-ratio": 0})


@pytest.fixture
async def etcd_store(etcd: Server) -> AsyncIterator[EtcdStore]:
    store = EtcdStore.from_environment(etcd.environment)
    yield store
    await store.close()


@pytest.fixture
async def nats_store(nats: Server) -> AsyncIterator[NatsStore]:
    store = NatsStore.from_environment(nats.environment)
    yield store
    await store.close()


@pytest.fixture
async def nats_bucket(nats: Server, nats_store: NatsStore) -> AsyncIterator[KeyValue]:
    """The bucket of ``nats_store`` as NATS' own client for Python sees it."""
    await nats_store.identity()
    client = await nats_py.connect(nats.environment["NATS_SERVER"], token=nats.environment["NATS_AUTH_TOKEN"])
    yield await client.jetstream().key_value("dynaplan")
    await client.close()
