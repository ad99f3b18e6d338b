"""The workers that probably hold the KV blocks of a prompt's beginning, by the prompts sent to them.

The router does not hear of the engines' evictions, so an entry simply expires. Source: the approximate
mode of Dynamo's KV router (time to live 120 s, a cap on the number of blocks).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

TIME_TO_LIVE_S = 120.0
"""Seconds for which a block that was sent to a worker is taken to be in its cache."""

LARGEST_BLOCKS = 65_536
"""The largest number of blocks that are remembered: about 1 million tokens in blocks of 16."""


class PrefixIndex:
    """Remembers for each block hash the workers it was sent to, and when; drops the least recent blocks
    first.

    The hashes are those of ``dynaplan.core.engine.kv_blocks.chain_hashes``.
    A worker that left needs no forgetting: its id never comes back, and its entries expire.
    """

    def __init__(self, time_to_live_s: float = TIME_TO_LIVE_S, largest_blocks: int = LARGEST_BLOCKS) -> None:
        self._time_to_live_s = time_to_live_s
        self._largest_blocks = largest_blocks
        self._sent_s: OrderedDict[int, dict[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sent_s)

    def record(self, hashes: Sequence[int], worker: int, now_s: float) -> None:
        """Note that these blocks were sent to that worker."""
        for block in hashes:
            self._sent_s.setdefault(block, {})[worker] = now_s
            self._sent_s.move_to_end(block)
        while len(self._sent_s) > self._largest_blocks:
            self._sent_s.popitem(last=False)

    def overlaps(self, hashes: Sequence[int], now_s: float) -> dict[int, int]:
        """Return by worker the number of first blocks that it probably holds without a gap; absent if
        none."""
        found: dict[int, int] = {}
        holders: set[int] | None = None
        for block in hashes:
            fresh = self._fresh(block, now_s)
            holders = fresh if holders is None else holders & fresh
            if not holders:
                break
            for worker in holders:
                found[worker] = found.get(worker, 0) + 1
        return found

    def _fresh(self, block: int, now_s: float) -> set[int]:
        oldest_s = now_s - self._time_to_live_s
        return {worker for worker, sent_s in self._sent_s.get(block, {}).items() if sent_s >= oldest_s}
