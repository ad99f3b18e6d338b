"""Servers that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.servers import Server, start_etcd, start_nats


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real etcd, to be left as it is."""
    server = start_etcd(tmp_path_factory.mktemp("e"))
    yield server
    server.kill()


@pytest.fixture(scope="module")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A real NATS server, to be left as it is."""
    server = start_nats(tmp_path_factory.mktemp("n"))
    yield server
    server.kill()
