"""The frontend's index of KV blocks, kept current by what the workers publish.

A worker that publishes, by its card, is asked once for all its blocks, and its events are followed from
there; ``index.IndexSync`` has the rules. Whatever interrupts the events makes the
worker's blocks uncertain (``is_current``) until it has been asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from dynaplan.engines.kv_events import (
    CARD_KEY,
    EVENT_ID_HEADER,
    INSTANCE_ID_HEADER,
    SNAPSHOT_PATH,
    TOPIC,
    CacheSnapshot,
    KvEvent,
    Removed,
    Stored,
    read_kv_payload,
)
from dynaplan.events.component_events import ComponentEvents
from dynaplan.events.port import EventSubscription
from dynaplan.events.subjects import Event
from dynaplan.events.wire_formats import payload_reader
from dynaplan.gateway import timing
from dynaplan.http.client import HttpClient
from dynaplan.http.tls import ClientTls
from dynaplan.routing.kv_index import IndexSync, KvIndex
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import ConfigError, PermanentError, QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks

if TYPE_CHECKING:
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)


BLOCKS_AT_ONCE = 4096
"""Blocks of events that are applied before the event loop gets its turn."""

MAX_WARNINGS = 100

Connect = Callable[[], Awaitable[ComponentEvents]]
"""Returns the events of the deployment; raises QueueUnavailable while the event plane does not answer."""


class Snapshots(Protocol):
    """Where the snapshots of workers' caches come from."""

    async def fetch(self, instance: Instance) -> CacheSnapshot:
        """Fetch all blocks of a worker; raises ValueError or OSError."""
        ...

    async def close(self) -> None: ...


class SnapshotClient:
    """Asks workers for the blocks that they hold; by ``tls`` the ones that speak https are verified."""

    def __init__(self, token: str, tls: ClientTls = True) -> None:
        self._http = HttpClient(token, tls)

    async def fetch(self, instance: Instance) -> CacheSnapshot:
        """Ask the worker for all blocks that it holds; raises as ``Snapshots`` says."""
        answer = await self._http.get(f"{instance.url}{SNAPSHOT_PATH}", timeout_s=timing.SNAPSHOT_TIMEOUT_S)
        numbers = {name: answer.headers.get(name) for name in (INSTANCE_ID_HEADER, EVENT_ID_HEADER)}
        return CacheSnapshot.of(numbers, answer.body)

    async def close(self) -> None:
        await self._http.close()


class KvCacheFollower:
    """The KV blocks of every worker of a namespace that publishes them, prefill workers included."""

    def __init__(
        self,
        discovery: Discovery,
        namespace: str,
        connect: Connect,
        snapshots: Snapshots,
    ) -> None:
        self._discovery = discovery
        self._namespace = namespace
        self._connect = connect
        self._snapshot_source = snapshots
        self._index = KvIndex()
        self._sync = IndexSync(self._index)
        self._read = payload_reader(object)
        self._tasks = BackgroundTasks()
        self._events: ComponentEvents | None = None
        self._continuity: int | None = None
        self._instances: Mapping[int, Instance] = {}
        self._requested_s: dict[int, float] = {}
        self._is_sweeping = False
        self._warned: set[str] = set()
        self._applied = 0
        self._unreadable = 0
        self._snapshots_loaded = 0
        self._stop_following: Callable[[], None] = lambda: None

    @classmethod
    def from_runtime(cls, runtime: WorkerRuntime) -> KvCacheFollower:
        """Return a follower that uses the runtime's connections, not started."""
        client = SnapshotClient(runtime.worker_token, runtime.client_tls)
        return cls(runtime.discovery, runtime.namespace, runtime.events, client)

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return by instance id the number of first blocks that it holds without a gap; absent if none."""
        return self._index.overlaps(hashes)

    def is_current(self, instance_id: int) -> bool:
        """Return whether all that the instance has reported of its blocks has arrived."""
        events = self._events
        return (
            events is not None
            and self._continuity is not None
            and events.continuity() == self._continuity
            and self._sync.is_current(instance_id)
        )

    @property
    def publishing(self) -> tuple[int, ...]:
        return tuple(self._instances)

    def metrics(self) -> dict[str, float]:
        """Return the numbers for ``/metrics``: of the index, and of what keeps it current."""
        return {
            "dynaplan:kv_index_blocks": len(self._index),
            "dynaplan:kv_index_workers": len(self._instances),
            "dynaplan:kv_index_workers_current": sum(map(self.is_current, self._instances)),
            "dynaplan:kv_index_events_total": self._applied,
            "dynaplan:kv_index_events_unreadable_total": self._unreadable,
            "dynaplan:kv_index_gaps_total": self._sync.gaps,
            "dynaplan:kv_index_snapshots_total": self._snapshots_loaded,
        }

    def start(self) -> None:
        """Follow in the background, as soon as the event plane answers."""
        self._stop_following = self._discovery.on_change(self._update_instances)
        self._update_instances()
        self._tasks.spawn(self._run(), "follow KV events")

    async def close(self) -> None:
        self._stop_following()
        await self._tasks.cancel()
        await self._snapshot_source.close()

    async def _run(self) -> None:
        backoff = Backoff(0.1, timing.EVENT_PLANE_MAX_BACKOFF_S)
        while True:
            try:
                events = await self._connect()
                subscription = await events.subscribe(f"{self._namespace}.*.{TOPIC}")
                backoff.reset()
                await self._follow(events, subscription)
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("prefixes are predicted until the event plane answers: %s", error)
            except (PermanentError, ConfigError) as error:
                log.error("KV events cannot be received, so that prefixes are predicted: %s", error)
                return
            await backoff.pause()

    async def _follow(self, events: ComponentEvents, subscription: EventSubscription) -> None:
        """Apply events until the subscription ends; raises QueueUnavailable then."""
        watching = self._tasks.spawn(self._watch_continuity(events), "watch the event plane")
        try:
            blocks = 0
            async for event in subscription:
                blocks += self._receive(event)
                if blocks > BLOCKS_AT_ONCE:
                    blocks = 0
                    await asyncio.sleep(0)
        finally:
            watching.cancel()
            self._events = None
            await subscription.close()
        raise QueueUnavailable("the subscription has ended")

    async def _watch_continuity(self, events: ComponentEvents) -> None:
        """Ask every worker again whenever events may have been lost with a connection."""
        self._events, self._continuity = events, None
        while True:
            now = events.continuity()
            if now is not None and now != self._continuity:
                self._continuity = now
                self._sync.invalidate()
                self._request_snapshots()
            await asyncio.sleep(timing.EVENT_PLANE_POLL_S)

    def _receive(self, event: Event) -> int:
        """Apply one message; return the number of its blocks."""
        try:
            changes = read_kv_payload(self._read(event.payload))
        except ValueError as error:
            self._unreadable += 1
            self._warn_once(f"KV events of {event.subject} cannot be read: {error}")
            return 1
        for each in changes:
            self._sync.apply(each)
        self._applied += len(changes)
        if self._sync.missing_snapshots():
            self._request_snapshots()
        return 1 + sum(map(_blocks, changes))

    def _update_instances(self) -> None:
        self._instances = {
            each.instance_id: each for each in self._discovery.all() if publishes_kv_events(each.card)
        }
        self._requested_s = {each: s for each, s in self._requested_s.items() if each in self._instances}
        self._sync.set_workers(self._instances)
        self._sweep()
        self._request_snapshots()

    def _request_snapshots(self) -> None:
        """Fetch the snapshots that are needed, but only while the events after them are received."""
        if self._events is None or self._continuity is None:
            return
        for worker in self._sync.missing_snapshots():
            ticket = self._sync.request_snapshot(worker)
            self._tasks.spawn(self._load_snapshot(worker, ticket), f"load the KV blocks of {worker:x}")

    async def _load_snapshot(self, worker: int, ticket: int) -> None:
        """Fetch the worker's snapshot and apply it, with retries while it is wanted."""
        now_s = asyncio.get_running_loop().time
        backoff = Backoff(timing.SNAPSHOT_RETRY_S, timing.EVENT_PLANE_MAX_BACKOFF_S)
        await asyncio.sleep(
            self._requested_s.get(worker, -timing.SNAPSHOT_RETRY_S) + timing.SNAPSHOT_RETRY_S - now_s()
        )
        while self._sync.is_requested(worker, ticket):
            instance = self._instances[worker]
            self._requested_s[worker] = now_s()
            try:
                for _ in self._sync.load_snapshot(
                    worker, ticket, await self._snapshot_source.fetch(instance)
                ):
                    await asyncio.sleep(0)
                self._snapshots_loaded += 1
            except (OSError, ValueError) as error:
                self._warn_once(f"{instance.worker} does not report its KV blocks: {error or 'no answer'}")
                await backoff.pause()
        self._sweep()

    def _sweep(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            self._tasks.spawn(self._sweep_in_slices(), "sweep the KV index")

    async def _sweep_in_slices(self) -> None:
        try:
            while self._index.sweep():
                await asyncio.sleep(timing.INDEX_SWEEP_PAUSE_S)
        finally:
            self._is_sweeping = False

    def _warn_once(self, fault: str) -> None:
        if fault not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(fault)
            log.warning("%s", fault)


def publishes_kv_events(card: Mapping[str, object]) -> bool:
    published = card.get(CARD_KEY)
    block_tokens = published.get("block_tokens") if isinstance(published, Mapping) else None
    return isinstance(block_tokens, int) and block_tokens > 0


def _blocks(event: KvEvent) -> int:
    return len(event.change.hashes) if isinstance(event.change, Stored | Removed) else 0
