"""Connections to the servers that the processes of a deployment share, and the clock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    ETCD,
    FILE,
    KUBERNETES,
    NATS,
    store_backend,
)
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.store.port import Store


FOR_EVER = ProcessSettings.nats_max_reconnects


def connect_store(environ: Mapping[str, str] = os.environ) -> Store:
    """Return a connection to the key-value store that ``DYN_DISCOVERY_BACKEND`` chooses; etcd by default.

    Raises ConfigError for a word that is no store, and for what says wrongly where the store is.
    """
    backend = store_backend(environ)
    if backend == ETCD:
        from dynaplan.store.etcd import EtcdStore

        return EtcdStore.from_environment(environ)
    if backend == FILE:
        from dynaplan.store.file.store import FileStore

        return FileStore.from_environment(environ)
    if backend == NATS:
        from dynaplan.store.nats_kv.store import NatsStore

        return NatsStore.from_environment(environ)
    if backend == KUBERNETES:
        from dynaplan.store.kubernetes_kv.store import ClusterStore

        return ClusterStore.from_environment(environ)
    raise ConfigError(
        f"{BACKEND_VARIABLE} is {backend!r}: that store lives in one process",
        hint="Use file, which needs no server either.",
    )


@cache
def memory_store() -> Store:
    """Return the key-value store of this process, the same one whenever it is asked for: never close it."""
    return empty_store()


def empty_store() -> Store:
    """Return a key-value store in memory that is the caller's own, to close as any other."""
    from dynaplan.store.memory import MemoryStore

    return MemoryStore(SystemClock())
