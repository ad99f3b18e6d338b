"""All that a frontend's router knows besides its own bookings: caches, tokens, other frontends' bookings.

Only what the settings ask for is there: other modes than ``kv`` need none of it but other bookings, and
``no-kv-events`` without replica sync connects to no event plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dynaplan.config.settings.routing import RoutingSettings
from dynaplan.engines.kv_events.wire import FOLLOWS
from dynaplan.gateway.kv_routing.cache_worth_notice import CacheWorthNotice
from dynaplan.gateway.kv_routing.cached_prefixes import BY_PREFIX, CachedPrefixes, ToldBlocks
from dynaplan.gateway.kv_routing.kv_cache_follower import KvCacheFollower
from dynaplan.gateway.kv_routing.replica_sync import ReplicaSync, shares
from dynaplan.gateway.kv_routing.tokens.models import ModelTokenizers
from dynaplan.gateway.routing.booking import WorkerBook

if TYPE_CHECKING:
    from dynaplan.worker.worker_runtime import WorkerRuntime


class RouterKnowledge:
    """Made before the router, started with the frontend, closed with it."""

    def __init__(self, runtime: WorkerRuntime, settings: RoutingSettings) -> None:
        self._runtime = runtime
        is_by_prefix = settings.router == BY_PREFIX
        has_events = is_by_prefix and settings.kv_events
        self._follower = KvCacheFollower.of_process(runtime) if has_events else None
        self._sync = self._replica_sync() if settings.router_replica_sync else None
        self._books: Callable[[], Mapping[int, WorkerBook]] = dict
        self.tokenizers = ModelTokenizers() if is_by_prefix else None
        self.prefixes = CachedPrefixes(settings, self._follower, self._tell_sent) if is_by_prefix else None
        self._worth = CacheWorthNotice(runtime) if is_by_prefix else None
        self.others: Mapping[int, WorkerBook] = self._sync.others if self._sync else {}

    def start(self, books: Callable[[], Mapping[int, WorkerBook]]) -> None:
        """Begin to follow what others tell, and to tell them of these books."""
        self._books = books
        if self._follower:
            self._follower.start()
            self._runtime.describe(**{FOLLOWS: True})
            self._runtime.add_metrics(self._follower.metrics)
        if self._worth:
            self._runtime.spawn(self._worth.run(), "tell the worth of caches")
        if self._sync:
            self._sync.start()
            self._runtime.discovery.on_change(self._take_registrations)

    @property
    def told(self) -> ToldBlocks | None:
        """The blocks that engines tell of; None where none are heard."""
        return self._follower

    def served(self, instance_id: int, tokens: int) -> None:
        """Note tokens of a prompt that came out of the cache of this instance."""
        if self._worth:
            self._worth.served(instance_id, tokens)

    def changed(self) -> None:
        """Note that a book has changed."""
        if self._sync:
            self._sync.changed()

    async def close(self) -> None:
        """End the following of engines' blocks and the exchange with other frontends."""
        if self._sync:
            await self._sync.close()
        if self._follower:
            await self._follower.close()
        if self.tokenizers:
            await self.tokenizers.close()

    def _replica_sync(self) -> ReplicaSync:
        return ReplicaSync(
            own_id=lambda: self._runtime.instance_id,
            own=lambda: shares(self._books()),
            heard=self._hear_sent,
            connect=self._runtime.events,
        )

    def _tell_sent(self, hashes: Sequence[int], instance_id: int) -> None:
        if self._sync:
            self._sync.sent(hashes, instance_id)

    def _hear_sent(self, hashes: Sequence[int], instance_id: int) -> None:
        if self.prefixes:
            self.prefixes.heard(hashes, instance_id, asyncio.get_running_loop().time())

    def _take_registrations(self) -> None:
        assert self._sync
        self._sync.registered(each.instance_id for each in self._runtime.discovery.all())
