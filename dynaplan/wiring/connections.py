"""Connections to the servers that the processes of a deployment share, and the clock."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan.domain.errors import ConfigError, QueueUnavailable
from dynaplan.domain.settings.events import HOST_VARIABLE, event_plane, is_original, max_age_s
from dynaplan.domain.settings.servers import (
    BACKEND_VARIABLE,
    ETCD,
    FILE,
    KUBERNETES,
    NATS,
    is_without_nats,
    store_backend,
)
from dynaplan.domain.settings.worker import ProcessSettings
from dynaplan.domain.wire.discovery import is_loopback

if TYPE_CHECKING:
    from dynaplan.ports.box import Clock
    from dynaplan.ports.events import EventPlane
    from dynaplan.ports.messaging import Messenger
    from dynaplan.ports.stores import Store
    from dynaplan.ports.tracing import Tracer


FOR_EVER = ProcessSettings.nats_max_reconnects


def system_clock() -> Clock:
    """Return the machine's monotonic clock, in seconds, which no setting of the time moves."""
    from dynaplan.adapters.clock import SystemClock

    return SystemClock()


def open_tracer(url: str) -> Tracer:
    """Return what sends spans to the collector at that address; raises ConfigError where it cannot."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"otlp-traces-endpoint is {url!r}", hint="Expected an address such as http://127.0.0.1:4318."
        )
    try:
        from dynaplan.adapters.tracing import otlp
    except ImportError as error:
        raise ConfigError(
            f"otlp-traces-endpoint needs OpenTelemetry's SDK: {error}",
            hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from None
    return otlp.open_tracer(url)


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
    if backend == NATS:
        from dynaplan.adapters.stores.nats_kv.store import NatsStore

        return NatsStore.from_environment(environ)
    if backend == KUBERNETES:
        from dynaplan.adapters.stores.kubernetes_kv.store import ClusterStore

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
    from dynaplan.adapters.stores.memory import MemoryStore

    return MemoryStore(system_clock())


async def connect_messenger(
    environ: Mapping[str, str] = os.environ, *, max_reconnects: int = FOR_EVER
) -> Messenger:
    """Return a connection to the messaging server that ``NATS_SERVER`` names; ``nats://localhost:4222``.

    ``max_reconnects`` is the option ``nats-max-reconnects``. Raises QueueUnavailable when the server does not
    answer, and in a deployment that has none.
    """
    if is_without_nats(environ):
        raise QueueUnavailable("this deployment has no NATS server: its graph has no prefill queue")
    from dynaplan.adapters.messaging.nats import NatsMessenger

    return await NatsMessenger.from_environment(environ, max_reconnects)


async def connect_events(
    store: Store,
    environ: Mapping[str, str] = os.environ,
    *,
    directory: str = "",
    prefix: str = "events",
    token: str = "",
    max_reconnects: int = FOR_EVER,
) -> EventPlane:
    """Return the event plane that ``DYN_EVENT_PLANE`` names; unless it is said, NATS where there is a server.

    Over ZMQ publishers are found through the store, their sockets lie in the directory and begin with the
    prefix, or are TCP ports at ``DYNAPLAN_ADVERTISE_HOST``, closed by the token. Raises ConfigError for a
    wrong word, QueueUnavailable when NATS does not answer.
    """
    age_s, original = max_age_s(environ), is_original(environ)
    if event_plane(environ) == NATS:
        if is_without_nats(environ):
            raise QueueUnavailable("this deployment has no NATS server for events")
        from dynaplan.adapters.events.nats_plane import NatsEventPlane
        from dynaplan.core.events.wires import OriginalWire, SeedWire

        wire = OriginalWire() if original else SeedWire()
        return await NatsEventPlane.from_environment(environ, wire, max_reconnects)
    from dynaplan.adapters.events.zmq_plane import ZmqEventPlane

    host = environ.get(HOST_VARIABLE, "")
    return ZmqEventPlane(
        store,
        Path(directory) if directory else None,
        prefix,
        host="" if is_loopback(host) else host,
        token=token,
        age_s=age_s,
        is_original=original,
    )
