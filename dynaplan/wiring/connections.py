"""Connections to the servers that the processes of a deployment share, and the clock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from dynaplan.domain.errors import ConfigError, QueueUnavailable
from dynaplan.domain.settings.servers import BACKEND_VARIABLE, ETCD, FILE, is_without_nats, store_backend

if TYPE_CHECKING:
    from dynaplan.ports.box import Clock
    from dynaplan.ports.messaging import Messenger
    from dynaplan.ports.stores import Store


def system_clock() -> Clock:
    """Return the machine's monotonic clock."""
    from dynaplan.adapters.clock import SystemClock

    return SystemClock()


def connect_store(environ: Mapping[str, str] = os.environ) -> Store:
    """Return a connection to the key-value store that ``DYN_DISCOVERY_BACKEND`` chooses; etcd by default.

    Raises ConfigError for a word that is no store, and for what says wrongly where the store is.
    """
    backend = store_backend(environ)
    if backend == ETCD:
        from dynaplan.adapters.stores.etcd import EtcdStore

        return EtcdStore.from_environment(environ)
    if backend == FILE:
        from dynaplan.adapters.stores.file.store import FileStore

        return FileStore.from_environment(environ)
    raise ConfigError(
        f"{BACKEND_VARIABLE} is {backend!r}: that store is not there yet", hint="Use etcd for now."
    )


@cache
def memory_store() -> Store:
    """Return the key-value store of this process, the same one whenever it is asked for: never close it."""
    from dynaplan.adapters.stores.memory import MemoryStore

    return MemoryStore(system_clock())


async def connect_messenger(environ: Mapping[str, str] = os.environ) -> Messenger:
    """Return a connection to the messaging server that ``NATS_SERVER`` names; ``nats://localhost:4222``.

    Raises QueueUnavailable when it does not answer, and in a deployment that has none.
    """
    if is_without_nats(environ):
        raise QueueUnavailable("this deployment has no NATS server: its graph has no prefill queue")
    from dynaplan.adapters.messaging.nats import NatsMessenger

    return await NatsMessenger.from_environment(environ)
