"""The inputs of a router besides its own bookings: cached prefixes, tokens, other frontends' bookings.

Cached blocks are *reported* by the engines, or *predicted*. Reported ones are exact; they need a worker whose
events arrive without a gap, and the model's own tokens. In every other case the router predicts: it remembers
for a while what was sent where.

Only what the settings ask for is made: other modes than ``kv`` need nothing but other frontends' bookings,
and ``no-kv-events`` without replica sync connects to no event plane.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from dynaplan.config.settings.routing import RoutingSettings
from dynaplan.engines.kv_events.wire import FOLLOWS
from dynaplan.fleet.cache_worth_keys import CACHE_WORTH, worth_text
from dynaplan.gateway.kv_routing.cache_worth import CacheWorth
from dynaplan.gateway.kv_routing.follower import KvCacheFollower
from dynaplan.gateway.kv_routing.index import PrefixIndex
from dynaplan.gateway.kv_routing.replica_sync import ReplicaSync, shares
from dynaplan.gateway.kv_routing.tokenizing import ModelTokenizers
from dynaplan.gateway.openai_api import PromptBlocks
from dynaplan.gateway.routing.booking import WorkerBook
from dynaplan.store.model import Transaction
from dynaplan.util.errors import PermanentError, StoreUnavailable

if TYPE_CHECKING:
    from dynaplan.worker.process import WorkerRuntime

log = logging.getLogger(__name__)

BY_PREFIX = "kv"
"""The mode in which the cached beginning of a prompt counts."""


MOST_PREDICTED_BLOCKS = 8192
"""Blocks of one prompt that predictions are made from: 131,072 tokens in blocks of 16; more take too long."""


class ToldBlocks(Protocol):
    """The blocks of all workers, as their engines tell."""

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return by instance id the number of first blocks in the worker's cache; absent if none."""
        ...

    def is_current(self, instance_id: int) -> bool:
        """Tell whether all that the worker's engine told has arrived."""
        ...


class CachedPrefixes:
    """The part of a prompt that each worker has in its cache; ``told`` is None where no engine is heard.

    ``on_sent`` is called with the hashes and the worker of each prompt that predictions are made from.
    """

    def __init__(
        self,
        settings: RoutingSettings,
        told: ToldBlocks | None = None,
        on_sent: Callable[[Sequence[int], int], None] = lambda hashes, instance_id: None,
    ) -> None:
        self._told = told
        self._on_sent = on_sent
        self._sent = PrefixIndex(
            settings.router_ttl_s, settings.router_max_tree_size, settings.router_prune_target_ratio
        )

    def overlaps(self, blocks: PromptBlocks, instance_ids: Iterable[int], now_s: float) -> dict[int, int]:
        """Return by instance id how many first blocks of the prompt the worker has; absent if none.

        Where events are missing, what was told last still says more than nothing.
        """
        sent = self._sent.overlaps(blocks.hashes[:MOST_PREDICTED_BLOCKS], now_s)
        if not self._told or not blocks.prompt_tokens:
            return sent
        told = self._told.overlaps(blocks.hashes)
        is_current = self._told.is_current
        return told | {
            each: blocks_sent
            for each in instance_ids
            if (blocks_sent := sent.get(each, 0)) > told.get(each, 0) and not is_current(each)
        }

    def sent(self, blocks: PromptBlocks, instance_id: int, now_s: float) -> None:
        """Note that the prompt goes to that worker, unless its engine will tell."""
        if not (blocks.prompt_tokens and self.is_told(instance_id)):
            hashes = blocks.hashes[:MOST_PREDICTED_BLOCKS]
            self._sent.record(hashes, instance_id, now_s)
            self._on_sent(hashes, instance_id)

    def heard(self, hashes: Sequence[int], instance_id: int, now_s: float) -> None:
        """Note that another frontend has sent a prompt with these blocks to that worker."""
        self._sent.record(hashes, instance_id, now_s)

    def is_told(self, instance_id: int) -> bool:
        """Tell whether the worker's engine is heard, and nothing that it told is missing."""
        return self._told is not None and self._told.is_current(instance_id)

    def left(self, instance_id: int) -> None:
        """Forget a worker that has gone."""
        self._sent.left(instance_id)


TELL_EVERY_S = 5.0
"""Seconds between two tellings; what has not changed is not written again."""

STORE_ANSWER_S = 3.0
"""Seconds after which a call to the store counts as unanswered."""


class CacheWorthNotice:
    """Keeps the key ``cache_worth`` of this frontend, under its lease, up to date."""

    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._worth = CacheWorth()
        self._told: tuple[str, str] | None = None

    def served(self, instance_id: int, tokens: int) -> None:
        """Note tokens of a prompt that came out of the cache of this instance."""
        if instance_id:
            self._worth.served(instance_id, tokens, self._runtime.clock.now_s())

    async def run(self) -> None:
        """Tell every ``TELL_EVERY_S`` what has changed, until cancelled."""
        while True:
            await self._runtime.clock.sleep(TELL_EVERY_S)
            try:
                async with asyncio.timeout(STORE_ANSWER_S):
                    await self.tell()
            except (TimeoutError, StoreUnavailable, PermanentError) as error:
                log.debug("the worth of caches is not told: %s", error or "no answer")

    async def tell(self) -> None:
        """Write what the caches are worth now, unless that is there already, or nothing was ever served."""
        runtime = self._runtime
        text = worth_text(self._worth.tokens(runtime.clock.now_s()))
        wanted = (CACHE_WORTH.key(runtime.namespace, runtime.instance_id), text)
        is_news = wanted != self._told and (self._told or text != worth_text({}))
        if not (is_news and runtime.instance_id):
            return
        await runtime.store.commit(Transaction(puts={wanted[0]: text}, lease=runtime.instance_id))
        self._told = wanted


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
