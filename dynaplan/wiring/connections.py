"""Connections to the servers that the processes of a deployment share, and the clock."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaplan.ports.box import Clock
    from dynaplan.ports.messaging import Messenger
    from dynaplan.ports.stores import Store


def system_clock() -> Clock:
    """Return the machine's monotonic clock."""
    from dynaplan.adapters.clock import SystemClock

    return SystemClock()


def connect_store() -> Store:
    """Return a connection to the key-value store that ``ETCD_ENDPOINTS`` names."""
    from dynaplan.adapters.stores.etcd import EtcdStore

    return EtcdStore.from_environment(os.environ)


async def connect_messenger() -> Messenger:
    """Return a connection to the messaging server that ``NATS_SERVER`` names."""
    from dynaplan.adapters.messaging.nats import NatsMessenger

    return await NatsMessenger.from_environment(os.environ)
