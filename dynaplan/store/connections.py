"""Connects to the key-value store that the environment names; each is imported only where it is used."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    ETCD,
    FILE,
    KUBERNETES,
    NATS,
    store_backend,
)
from dynaplan.util.entry_points import load_entry_point
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.store.port import Store


@asynccontextmanager
async def open_store() -> AsyncIterator[Store]:
    """Connect to the store as ``connect_store`` does, and close it at the end of the block."""
    store = connect_store()
    try:
        yield store
    finally:
        await store.close()


def connect_store(environ: Mapping[str, str] = os.environ) -> Store:
    """Return a connection to the key-value store that ``DYN_DISCOVERY_BACKEND`` chooses; etcd by default.

    Raises ConfigError for an unknown store, and for a wrong address of one.
    """
    backend = store_backend(environ)
    if backend == ETCD:
        from dynaplan.store.etcd import EtcdStore

        return EtcdStore.from_environment(environ)
    if backend == FILE:
        from dynaplan.store.file_store import FileStore

        return FileStore.from_environment(environ)
    if backend == NATS:
        from dynaplan.store.nats_store import NatsStore

        return NatsStore.from_environment(environ)
    if backend == KUBERNETES:
        store: Store = load_entry_point("dynaplan.stores", KUBERNETES).from_environment(environ)
        return store
    raise ConfigError(
        f"{BACKEND_VARIABLE} is {backend!r}: that store lives in one process",
        hint="Use file, which needs no server either.",
    )
