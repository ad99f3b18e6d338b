"""Publishes which KV blocks a worker's engine holds: changes by events, and all of them by a snapshot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dynaplan.engines.kv_events import (
    SNAPSHOT_PATH,
    TOPIC,
    BlockChange,
    CachedBlocks,
    KvEvent,
    Removed,
    Stored,
    kv_payload,
)
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import Route
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import ConfigError, PermanentError, QueueUnavailable
from dynaplan.worker.timing import KV_EVENT_QUIET_S, KV_EVENT_RETRY_MAX_S, KV_EVENT_RETRY_MIN_S

if TYPE_CHECKING:
    from dynaplan.events.component_events import ComponentEvents
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)


MAX_WAITING_EVENTS = 4096
"""Events that wait to be published; beyond them all are dropped, and frontends ask for everything."""

MAX_MESSAGE_BLOCKS = 4096
"""Blocks in one message, which has then about 250 kB."""


class KvEventPublisher:
    """Publishes the changes of one worker's cache, and serves ``GET /kv_blocks``."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._blocks = CachedBlocks()
        self._waiting: list[KvEvent] = []
        self._filled = asyncio.Event()
        self._published = 0

    def routes(self) -> Sequence[Route]:
        """Return the route of the snapshot; it asks for the worker token."""
        return (Route("GET", SNAPSHOT_PATH, self._snapshot, is_work=False),)

    def metrics(self) -> dict[str, float]:
        return {
            "dynaplan:kv_blocks_cached": len(self._blocks),
            "dynaplan:kv_block_events_total": self._published,
        }

    def changed(self, changes: Sequence[BlockChange]) -> None:
        """Queue the changes of an engine's step, to be published soon.

        Beyond MAX_WAITING_EVENTS all that wait are dropped; frontends then ask for the whole cache.
        """
        self._waiting += self._blocks.events(self._runtime.instance_id, changes)
        if len(self._waiting) > MAX_WAITING_EVENTS:
            self._waiting.clear()
        if self._waiting:
            self._filled.set()

    async def run(self) -> None:
        """Publish until cancelled, or until the event plane cannot be used at all: then frontends predict."""
        try:
            events = await self._connect()
        except (PermanentError, ConfigError) as error:
            log.error("no KV events are published, so that prefixes are predicted: %s", error)
            return
        await self._run(events)

    async def _run(self, events: ComponentEvents) -> None:
        is_quiet = True
        while True:
            try:
                async with asyncio.timeout(None if is_quiet else KV_EVENT_QUIET_S):
                    await self._filled.wait()
                is_quiet = False
            except TimeoutError:
                is_quiet = True
                self.changed([Removed(())])
            self._filled.clear()
            waiting, self._waiting = self._waiting, []
            for message in _messages(waiting):
                await self._publish(events, message)

    async def _connect(self) -> ComponentEvents:
        """Return the events of this component once the event plane answers."""
        backoff = Backoff(KV_EVENT_RETRY_MIN_S, KV_EVENT_RETRY_MAX_S, self._runtime.clock.sleep)
        while True:
            try:
                return await self._runtime.events()
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("KV events wait for the event plane: %s", error)
                await backoff.pause()

    async def _publish(self, events: ComponentEvents, message: Sequence[KvEvent]) -> None:
        try:
            await events.publish_serialized(TOPIC, kv_payload(message))
            self._published += len(message)
        except (PermanentError, ConfigError) as error:
            log.warning("KV events are lost: %s", error)

    async def _snapshot(self, _: Request) -> Response:
        snapshot = self._blocks.snapshot(self._runtime.instance_id)
        return Response(200, snapshot.headers(), snapshot.body())


def _messages(events: Sequence[KvEvent]) -> Iterator[list[KvEvent]]:
    """Cut the events into messages of a bounded size; one step's events stay together where they fit."""
    message: list[KvEvent] = []
    blocks = 0
    for event in events:
        change = event.change
        size = len(change.hashes) if isinstance(change, Stored | Removed) else 0
        if message and blocks + size > MAX_MESSAGE_BLOCKS:
            yield message
            message, blocks = [], 0
        message.append(event)
        blocks += size
    if message:
        yield message
