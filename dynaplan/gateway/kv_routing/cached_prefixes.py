"""Tells a router the blocks that are in workers' caches: the engines say them, or they are predicted.

Told is exact, and needs both a worker whose events arrive without a gap and the model's own tokens. In every
other case the router predicts: it remembers what was sent where, for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dynaplan.config.settings.frontend import RoutingSettings
from dynaplan.gateway.kv_routing.prefix_index import PrefixIndex
from dynaplan.gateway.openai_api import PromptBlocks

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
