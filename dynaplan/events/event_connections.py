"""Connections to the message queue and to the event plane that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan.config.settings.servers import (
    HOST_VARIABLE,
    NATS,
    event_plane,
    has_no_nats,
    is_original,
    max_age_s,
)
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.store.instances import is_loopback
from dynaplan.util.errors import QueueUnavailable

if TYPE_CHECKING:
    from dynaplan.events.messaging_port import Messenger
    from dynaplan.events.port import EventPlane
    from dynaplan.store.port import Store


FOR_EVER = ProcessSettings.nats_max_reconnects


async def connect_messenger(
    environ: Mapping[str, str] = os.environ, *, max_reconnects: int = FOR_EVER
) -> Messenger:
    """Return a connection to the messaging server that ``NATS_SERVER`` names; ``nats://localhost:4222``.

    ``max_reconnects`` is the option ``nats-max-reconnects``. Raises QueueUnavailable when the server does not
    answer, and in a deployment that has none.
    """
    if has_no_nats(environ):
        raise QueueUnavailable("this deployment has no NATS server: its graph has no prefill queue")
    from dynaplan.store.nats_connection import NatsMessenger

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
        if has_no_nats(environ):
            raise QueueUnavailable("this deployment has no NATS server for events")
        from dynaplan.events.nats_plane import NatsEventPlane
        from dynaplan.events.wires import OriginalWire, SeedWire

        wire = OriginalWire() if original else SeedWire()
        return await NatsEventPlane.from_environment(environ, wire, max_reconnects)
    from dynaplan.events.zmq_plane import ZmqEventPlane

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
