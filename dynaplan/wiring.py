"""The fuse box: the only module that names concrete adapters. Imports each one only when it is asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaplan.adapters.clock import SystemClock
    from dynaplan.adapters.stores.etcd import EtcdStore
    from dynaplan.ports import Messenger


def system_clock() -> SystemClock:
    """The machine's monotonic clock."""
    from dynaplan.adapters.clock import SystemClock

    return SystemClock()


def connect_store() -> EtcdStore:
    """The key-value store that ``ETCD_ENDPOINTS`` names; it also keeps leases."""
    from dynaplan.adapters.stores.etcd import EtcdStore

    return EtcdStore.from_environment(os.environ)


async def connect_messenger() -> Messenger:
    """The messaging server that ``NATS_SERVER`` names."""
    from dynaplan.adapters.queues.nats import NatsMessenger

    return await NatsMessenger.from_environment(os.environ)
