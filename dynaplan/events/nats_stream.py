"""The JetStream streams that keep events: one for each component, with its kept events' subjects."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nats.js import JetStreamManager
    from nats.js.api import StreamConfig, StreamInfo

    from dynaplan.store.nats_connection import NatsConnection

log = logging.getLogger(__name__)

# The server sets this room aside for each stream: the embedded one has 1 GB for all.
MAX_BYTES = 64 * 2**20
DUPLICATES_S = 120.0
# JetStream's error codes: a message, or the stream's state, cannot be stored: its files are damaged or gone.
DAMAGED = frozenset({10012, 10077, 10104})


def stream_name(namespace: str, component: str) -> str:
    """Return the name of a component's stream."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", f"{namespace}_{component}_events")


async def ensure_stream(connection: NatsConnection, name: str, subject: str, age_s: float) -> StreamInfo:
    """Return the stream, made or widened so that it keeps the subject.

    Two processes that widen it at once may undo each other's work: a publisher notices, and comes again.
    """
    from nats.js.errors import APIError, NotFoundError

    async with connection.call() as client:
        manager = client.jsm()
        try:
            found = await manager.stream_info(name)
        except NotFoundError:
            return await manager.add_stream(_config(name, [subject], age_s))
        except APIError as error:
            if error.err_code not in DAMAGED:
                raise
            await _remove(manager, name, error)
            return await manager.add_stream(_config(name, [subject], age_s))
        subjects = list(found.config.subjects or ())
        if subject in subjects and found.config.max_age == age_s:
            return found
        config = replace(found.config, subjects=sorted({*subjects, subject}), max_age=age_s)
        return await manager.update_stream(config)


async def find_stream(connection: NatsConnection, name: str, pattern: str, age_s: float) -> StreamInfo:
    """Return the stream for a pattern: made when the pattern is a subject, else only found."""
    if not {"*", ">"} & set(pattern):
        return await ensure_stream(connection, name, pattern, age_s)
    async with connection.call() as client:
        return await client.jsm().stream_info(name)


async def remove_stream(connection: NatsConnection, name: str, why: object) -> None:
    """Delete a stream that is damaged, to be made anew."""
    async with connection.call() as client:
        await _remove(client.jsm(), name, why)


async def _remove(manager: JetStreamManager, name: str, why: object) -> None:
    from nats.js.errors import NotFoundError

    log.warning("the stream %s is damaged, and made anew: %s", name, why)
    with suppress(NotFoundError):
        await manager.delete_stream(name)


def _config(name: str, subjects: list[str], age_s: float) -> StreamConfig:
    from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig

    return StreamConfig(
        name=name,
        subjects=subjects,
        retention=RetentionPolicy.LIMITS,
        discard=DiscardPolicy.OLD,
        storage=StorageType.FILE,
        max_age=age_s,
        max_bytes=MAX_BYTES,
        duplicate_window=min(DUPLICATES_S, age_s),
        num_replicas=1,
    )
