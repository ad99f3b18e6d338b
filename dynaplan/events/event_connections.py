"""Connections to the message queue and to the event plane that the environment names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynaplan.config.settings.servers import has_no_nats, is_original
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.util.errors import QueueUnavailable

if TYPE_CHECKING:
    from dynaplan.events.port import EventPlane, Messenger

UNLIMITED = ProcessSettings.nats_max_reconnects


async def connect_messenger(
    environ: Mapping[str, str] = os.environ, *, max_reconnects: int = UNLIMITED
) -> Messenger:
    """Return a connection to the messaging server that ``NATS_SERVER`` names; ``nats://localhost:4222``.

    ``max_reconnects`` is the option ``nats-max-reconnects``. Raises QueueUnavailable when the server does not
    answer, and in a deployment that has none.
    """
    if has_no_nats(environ):
        raise QueueUnavailable("this deployment has no NATS server: its graph has no prefill queue")
    from dynaplan.events.nats_messenger import NatsMessenger

    return await NatsMessenger.from_environment(environ, max_reconnects)


async def connect_events(
    environ: Mapping[str, str] = os.environ, *, max_reconnects: int = UNLIMITED
) -> EventPlane:
    """Return the event plane, on the server that ``connect_messenger`` connects to.

    Raises ConfigError for a wrong setting of events, QueueUnavailable as there.
    """
    original = is_original(environ)
    if has_no_nats(environ):
        raise QueueUnavailable("this deployment has no NATS server for events")
    from dynaplan.events.nats_plane import NatsEventPlane
    from dynaplan.events.wire_formats import DynamoFormat, PlainFormat

    wire = DynamoFormat() if original else PlainFormat()
    return await NatsEventPlane.from_environment(environ, wire, max_reconnects)
