"""Worker processes over a real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest

from dynaplan.store.etcd import EtcdStore
from tests.fakes.servers import Server
from tests.integration.worker_child import AUTHORIZATION, Workers, workers_of


@pytest.fixture
def workers(tmp_path: Path, etcd: Server) -> Iterator[Workers]:
    """Worker processes that register in this etcd."""
    yield from workers_of(tmp_path, etcd.environment)


@pytest.fixture
async def store(etcd: Server) -> AsyncIterator[EtcdStore]:
    made = EtcdStore.from_environment(etcd.environment)
    yield made
    await made.close()


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """A client that has the workers' token."""
    async with aiohttp.ClientSession(headers=AUTHORIZATION) as made:
        yield made
