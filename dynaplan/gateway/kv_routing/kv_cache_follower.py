"""The frontend's index of KV blocks, kept current by what the workers publish.

A worker that says in its card that it publishes is asked once for all its blocks, and its events follow from
there; ``gateway/kv_routing/kv_following.py`` holds the rules. Whatever interrupts the events makes the
worker's blocks uncertain (``is_current``) until it has been asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import aiohttp

from dynaplan.engines.kv_events.wire import (
    CARD_KEY,
    SNAPSHOT_PATH,
    TOPIC,
    CacheSnapshot,
    KvEvent,
    Removed,
    Stored,
    read_kv_payload,
)
from dynaplan.events.component_events import ComponentEvents
from dynaplan.events.subjects import Event
from dynaplan.events.wires import payload_reader
from dynaplan.gateway.kv_routing.kv_following import KvFollowing
from dynaplan.gateway.kv_routing.kv_index import KvIndex
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import ConfigError, PermanentError, QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.util.tls import ClientTls
from dynaplan.worker.calls.http_calls import worker_session

if TYPE_CHECKING:
    from dynaplan.worker.process import WorkerRuntime

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.2
"""Seconds between two looks whether the connection of the event plane broke."""

ASK_AGAIN_S = 0.5
"""Least time between two questions for one worker's snapshot."""

LONGEST_PAUSE_S = 5.0
SNAPSHOT_S = 10.0
SWEEP_PAUSE_S = 0.005

BLOCKS_AT_ONCE = 4096
"""Blocks of events that are taken over before the event loop gets its turn."""

MOST_NAMED = 100

Connect = Callable[[], Awaitable[ComponentEvents]]
"""Returns the events of the deployment; raises QueueUnavailable while the event plane does not answer."""

Fetch = Callable[[Instance], Awaitable[CacheSnapshot]]
"""Asks a worker for its blocks; raises ValueError, OSError, TimeoutError or aiohttp.ClientError."""


class SnapshotClient:
    """Asks workers for the blocks that they hold; by ``tls`` the ones that speak https are verified."""

    def __init__(self, token: str, tls: ClientTls = True) -> None:
        self._token = token
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def fetch(self, instance: Instance) -> CacheSnapshot:
        """Ask the worker for all blocks that it holds; raises what ``Fetch`` says."""
        self._session = self._session or worker_session(self._token, self._tls)
        timeout = aiohttp.ClientTimeout(total=SNAPSHOT_S)
        async with self._session.get(f"{instance.url}{SNAPSHOT_PATH}", timeout=timeout) as response:
            if response.status != 200:
                raise ValueError(f"it answers with status {response.status}")
            return CacheSnapshot.of(response.headers, await response.read())

    async def close(self) -> None:
        """Close the connections to workers, if any were opened."""
        if self._session:
            await self._session.close()


class KvCacheFollower:
    """The KV blocks of every worker of a namespace that publishes them, prefill workers included."""

    def __init__(
        self,
        discovery: Discovery,
        namespace: str,
        connect: Connect,
        fetch: Fetch,
        index: KvIndex | None = None,
    ) -> None:
        self._discovery = discovery
        self._namespace = namespace
        self._connect = connect
        self._fetch = fetch
        self._index = index or KvIndex()
        self._following = KvFollowing(self._index)
        self._read = payload_reader(object)
        self._tasks = BackgroundTasks()
        self._events: ComponentEvents | None = None
        self._continuity: int | None = None
        self._instances: Mapping[int, Instance] = {}
        self._asked_s: dict[int, float] = {}
        self._is_sweeping = False
        self._named: set[str] = set()
        self._taken = 0
        self._unreadable = 0
        self._snapshots = 0
        self._stop_following: Callable[[], None] = lambda: None
        self._close_client: Callable[[], Awaitable[None]] = _nothing

    @classmethod
    def of_process(cls, runtime: WorkerRuntime) -> KvCacheFollower:
        """Return a follower on this process's connections, not started."""
        client = SnapshotClient(runtime.worker_token, runtime.client_tls)
        follower = cls(runtime.discovery, runtime.namespace, runtime.events, client.fetch)
        follower._close_client = client.close
        return follower

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return by instance id the number of first blocks that it holds without a gap; absent if none."""
        return self._index.overlaps(hashes)

    def is_current(self, instance_id: int) -> bool:
        """Tell whether all that the instance told of its blocks is known: no event is missing on the way."""
        events = self._events
        return (
            events is not None
            and self._continuity is not None
            and events.continuity() == self._continuity
            and self._following.is_current(instance_id)
        )

    @property
    def publishing(self) -> tuple[int, ...]:
        """The instances that publish their blocks."""
        return tuple(self._instances)

    def metrics(self) -> dict[str, float]:
        """Return what ``/metrics`` tells: the index, and what keeps it current."""
        return {
            "dynaplan:kv_index_blocks": len(self._index),
            "dynaplan:kv_index_workers": len(self._instances),
            "dynaplan:kv_index_workers_current": sum(map(self.is_current, self._instances)),
            "dynaplan:kv_index_events_total": self._taken,
            "dynaplan:kv_index_events_unreadable_total": self._unreadable,
            "dynaplan:kv_index_gaps_total": self._following.gaps,
            "dynaplan:kv_index_snapshots_total": self._snapshots,
        }

    def start(self) -> None:
        """Follow in the background, as soon as the event plane answers."""
        self._stop_following = self._discovery.on_change(self._take_instances)
        self._take_instances()
        self._tasks.spawn(self._run(), "follow KV events")

    async def close(self) -> None:
        """Stop following the workers, and close what that needed."""
        self._stop_following()
        await self._tasks.cancel()
        await self._close_client()

    async def _run(self) -> None:
        backoff = Backoff(0.1, LONGEST_PAUSE_S)
        while True:
            try:
                events = await self._connect()
                subscription = await events.subscribe(f"{self._namespace}.*.{TOPIC}")
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("prefixes are predicted until the event plane answers: %s", error)
                await backoff.pause()
                continue
            except (PermanentError, ConfigError) as error:
                log.error("KV events cannot be heard, so that prefixes are predicted: %s", error)
                return
            backoff.reset()
            looking = self._tasks.spawn(self._look(events), "look at the event plane")
            try:
                blocks = 0
                async for event in subscription:
                    blocks += self._take(event)
                    if blocks > BLOCKS_AT_ONCE:
                        blocks = 0
                        await asyncio.sleep(0)
            finally:
                looking.cancel()
                self._events = None
                await subscription.close()
            await backoff.pause()

    async def _look(self, events: ComponentEvents) -> None:
        """Ask every worker again whenever events may have been lost with a connection."""
        self._events, self._continuity = events, None
        while True:
            now = events.continuity()
            if now is not None and now != self._continuity:
                self._continuity = now
                self._following.interrupted()
                self._ask_all()
            await asyncio.sleep(LOOK_EVERY_S)

    def _take(self, event: Event) -> int:
        """Take one message over; return the number of its blocks."""
        try:
            changes = read_kv_payload(self._read(event.payload))
        except ValueError as error:
            self._unreadable += 1
            self._name_once(f"KV events of {event.subject} cannot be read: {error}")
            return 1
        for each in changes:
            self._following.take(each)
        self._taken += len(changes)
        if self._following.wanting():
            self._ask_all()
        return 1 + sum(map(_blocks, changes))

    def _take_instances(self) -> None:
        """Take over a change of the instances."""
        self._instances = {
            each.instance_id: each for each in self._discovery.all() if publishes_blocks(each.card)
        }
        self._asked_s = {each: s for each, s in self._asked_s.items() if each in self._instances}
        self._following.present(self._instances)
        self._sweep()
        self._ask_all()

    def _ask_all(self) -> None:
        """Ask the workers whose snapshots are needed, once events can follow it."""
        if self._events is None or self._continuity is None:
            return
        for worker in self._following.wanting():
            ticket = self._following.ask(worker)
            self._tasks.spawn(self._ask(worker, ticket), f"ask {worker:x} for its KV blocks")

    async def _ask(self, worker: int, ticket: int) -> None:
        """Take the worker's snapshot over, however often it has to be asked, while it is wanted."""
        now_s = asyncio.get_running_loop().time
        backoff = Backoff(ASK_AGAIN_S, LONGEST_PAUSE_S)
        await asyncio.sleep(self._asked_s.get(worker, -ASK_AGAIN_S) + ASK_AGAIN_S - now_s())
        while self._following.is_open(worker, ticket):
            instance = self._instances[worker]
            self._asked_s[worker] = now_s()
            try:
                for _ in self._following.replace(worker, ticket, await self._fetch(instance)):
                    await asyncio.sleep(0)
                self._snapshots += 1
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                self._name_once(f"{instance.worker} does not tell its KV blocks: {error or 'no answer'}")
                await backoff.pause()
        self._sweep()

    def _sweep(self) -> None:
        if not self._is_sweeping:
            self._is_sweeping = True
            self._tasks.spawn(self._sweep_in_slices(), "sweep the KV index")

    async def _sweep_in_slices(self) -> None:
        try:
            while self._index.sweep():
                await asyncio.sleep(SWEEP_PAUSE_S)
        finally:
            self._is_sweeping = False

    def _name_once(self, fault: str) -> None:
        if fault not in self._named and len(self._named) < MOST_NAMED:
            self._named.add(fault)
            log.warning("%s", fault)


def publishes_blocks(card: Mapping[str, object]) -> bool:
    """Tell whether a worker with this card publishes its KV blocks."""
    published = card.get(CARD_KEY)
    block_tokens = published.get("block_tokens") if isinstance(published, Mapping) else None
    return isinstance(block_tokens, int) and block_tokens > 0


async def _nothing() -> None:
    """Do nothing."""


def _blocks(event: KvEvent) -> int:
    return len(event.change.hashes) if isinstance(event.change, Stored | Removed) else 0
