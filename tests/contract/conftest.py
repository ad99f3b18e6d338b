"""Servers that the tests of a module share, and clients of a test's own server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import nats as nats_py
import pytest
from nats.js.kv import KeyValue

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.nats_store import NatsStore
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
