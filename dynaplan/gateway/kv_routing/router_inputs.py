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
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from dynaplan.config.settings.frontend import RoutingSettings
from dynaplan.engines.kv_events import FOLLOWS
from dynaplan.gateway.kv_routing.follower import KvCacheFollower
from dynaplan.gateway.kv_routing.replica_sync import ReplicaSync
from dynaplan.gateway.kv_routing.tokenizing import ModelTokenizers, Tokenizers
from dynaplan.gateway.openai_api import PromptBlocks
from dynaplan.routing.booking import WorkerBook
from dynaplan.routing.kv_index import PrefixIndex
from dynaplan.routing.routing_logic import KV_MODE

if TYPE_CHECKING:
    from dynaplan.events.component_events import ComponentEvents
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)

MAX_PREDICTED_BLOCKS = 8192
"""Blocks of one prompt that predictions are made from: 131,072 tokens in blocks of 16; more take too long."""


class ReportedBlocks(Protocol):
    """The blocks of all workers, as reported by their engines."""

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return by instance id the number of first blocks in the worker's cache; absent if none."""
        ...

    def is_current(self, instance_id: int) -> bool:
        """Return whether all that the worker's engine has reported has arrived."""
        ...


class CachedPrefixes:
    """The part of a prompt that each worker has in its cache; ``reported`` is None without KV events."""

    def __init__(self, settings: RoutingSettings, reported: ReportedBlocks | None = None) -> None:
        self._reported = reported
        self._predicted = PrefixIndex(
            settings.router_ttl_s, settings.router_max_tree_size, settings.router_prune_target_ratio
        )

    def overlaps(self, blocks: PromptBlocks, instance_ids: Iterable[int], now_s: float) -> dict[int, int]:
        """Return by instance id how many first blocks of the prompt the worker has; absent if none.

        Prompts that were sent count where the engine does not report, or a report is missing.
        """
        predicted = self._predicted.overlaps(blocks.hashes[:MAX_PREDICTED_BLOCKS], now_s)
        if not self._reported or not blocks.prompt_tokens:
            return predicted
        reported = self._reported.overlaps(blocks.hashes)
        is_current = self._reported.is_current
        return reported | {
            each: sent
            for each in instance_ids
            if (sent := predicted.get(each, 0)) > reported.get(each, 0) and not is_current(each)
        }

    def record(self, hashes: Sequence[int], instance_id: int, now_s: float) -> None:
        """Record that a prompt with these blocks goes to that worker, as a basis of predictions."""
        self._predicted.record(hashes[:MAX_PREDICTED_BLOCKS], instance_id, now_s)

    def is_predicted(self, blocks: PromptBlocks, instance_id: int) -> bool:
        """Return whether these blocks are only predicted: the worker's engine will not report them."""
        return not (blocks.prompt_tokens and self.is_reported(instance_id))

    def is_reported(self, instance_id: int) -> bool:
        """Return whether the worker's engine reports its blocks, and no report is missing."""
        return self._reported is not None and self._reported.is_current(instance_id)

    def remove_worker(self, instance_id: int) -> None:
        self._predicted.remove_worker(instance_id)


class RouterInputs:
    """The inputs of one router. ``prefixes`` is None unless the mode is ``kv``.

    The router that they are given to sets ``books``, its bookings by instance id.
    """

    def __init__(
        self,
        prefixes: CachedPrefixes | None = None,
        tokenizers: Tokenizers | None = None,
        replica_sync: ReplicaSync | None = None,
    ) -> None:
        self.prefixes = prefixes
        self.tokenizers = tokenizers
        self.replica_sync = replica_sync
        self.books: Mapping[int, WorkerBook] = {}

    @property
    def others(self) -> Mapping[int, WorkerBook]:
        """The other frontends' bookings, added up by instance id."""
        return self.replica_sync.others if self.replica_sync else _NO_BOOKS

    def record_prompt(self, blocks: PromptBlocks, instance_id: int, now_s: float) -> None:
        """Record that the prompt goes to that worker, unless its engine will report it."""
        if self.prefixes and self.prefixes.is_predicted(blocks, instance_id):
            self.prefixes.record(blocks.hashes, instance_id, now_s)
            if self.replica_sync:
                self.replica_sync.record_prompt(blocks.hashes[:MAX_PREDICTED_BLOCKS], instance_id)


_NO_BOOKS: Mapping[int, WorkerBook] = MappingProxyType({})


class FrontendRouterInputs(RouterInputs):
    """The inputs of a frontend's router, as its settings ask for: started and closed with the frontend.

    ``reported`` are the blocks that engines report; None without KV events.
    """

    def __init__(self, runtime: WorkerRuntime, settings: RoutingSettings) -> None:
        self._runtime = runtime
        is_by_prefix = settings.router == KV_MODE
        has_events = is_by_prefix and settings.kv_events
        self._follower = KvCacheFollower.from_runtime(runtime) if has_events else None
        self.reported: ReportedBlocks | None = self._follower
        self._model_tokenizers = ModelTokenizers() if is_by_prefix else None
        super().__init__(
            CachedPrefixes(settings, self._follower) if is_by_prefix else None,
            self._model_tokenizers,
            ReplicaSync(self) if settings.router_replica_sync else None,
        )

    def start(self) -> None:
        """Begin to follow what engines and other frontends report, and to report to others."""
        if self._follower:
            self._follower.start()
            self._runtime.describe(**{FOLLOWS: True})
            self._runtime.add_metrics(self._follower.metrics)
        if self.replica_sync:
            self.replica_sync.start()
            self._runtime.discovery.on_change(self._take_registrations)

    async def close(self) -> None:
        if self.replica_sync:
            await self.replica_sync.close()
        if self._follower:
            await self._follower.close()
        if self._model_tokenizers:
            await self._model_tokenizers.close()

    @property
    def instance_id(self) -> int:
        return self._runtime.instance_id

    async def events(self) -> ComponentEvents:
        return await self._runtime.events()

    def record_remote_prompt(self, hashes: Sequence[int], instance_id: int) -> None:
        if self.prefixes:
            self.prefixes.record(hashes, instance_id, asyncio.get_running_loop().time())

    def _take_registrations(self) -> None:
        assert self.replica_sync
        self.replica_sync.update_registrations(each.instance_id for each in self._runtime.discovery.all())
