"""The workers that probably hold the KV blocks of a prompt's beginning, by the prompts sent to them.

The router does not hear of the engines' evictions here, so an entry expires, and what is used least recently
goes first. Source: the approximate mode of Dynamo's KV router (time to live 120 s, 2**20 blocks, pruned to
80 %).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from dynaplan.config.settings.frontend import RoutingSettings

DROPPED_AT_ONCE = 4096
"""Blocks that one call of ``record`` drops at most beyond the surplus: about 0.5 ms."""

_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NEVER = float("-inf")


class PrefixIndex:
    """Remembers for each block hash and worker when it was sent there; drops the least recent first.

    A block is counted once for each worker that it was sent to. It is found by its hash with the bits of the
    worker's mark turned over: one number is half as large as a pair. Of a prompt the end is dropped first,
    because a beginning can be used without it and not the other way round.
    """

    def __init__(
        self,
        time_to_live_s: float = RoutingSettings.router_ttl_s,
        largest_blocks: int = RoutingSettings.router_max_tree_size,
        kept_share: float = RoutingSettings.router_prune_target_ratio,
    ) -> None:
        self._time_to_live_s = time_to_live_s
        self._largest_blocks = largest_blocks
        self._target_blocks = max(1, int(largest_blocks * kept_share))
        self._is_pruning = False
        self._sent_s: OrderedDict[int, float] = OrderedDict()
        self._marks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sent_s)

    def record(self, hashes: Sequence[int], worker: int, now_s: float) -> None:
        """Note that these blocks were sent to that worker."""
        mark = self._marks.setdefault(worker, worker * _SPREAD & _MASK)
        sent_s = self._sent_s
        for block in reversed(hashes):
            key = block ^ mark
            sent_s[key] = now_s
            sent_s.move_to_end(key)
        self._prune()

    def overlaps(self, hashes: Sequence[int], now_s: float) -> dict[int, int]:
        """Return by worker the number of first blocks that it probably holds without a gap; absent if
        none."""
        oldest_s = now_s - self._time_to_live_s
        found: dict[int, int] = {}
        sent_s = self._sent_s.get
        for worker, mark in self._marks.items():
            depth = 0
            for block in hashes:
                if sent_s(block ^ mark, _NEVER) < oldest_s:
                    break
                depth += 1
            if depth:
                found[worker] = depth
        return found

    def left(self, worker: int) -> None:
        """Forget a worker; its blocks expire."""
        self._marks.pop(worker, None)

    def _prune(self) -> None:
        """Drop what is too many, and on the way to the target a slice more."""
        size = len(self._sent_s)
        too_many = size - self._largest_blocks
        self._is_pruning = too_many > 0 or (self._is_pruning and size > self._target_blocks)
        if self._is_pruning:
            for _ in range(max(too_many, min(size - self._target_blocks, DROPPED_AT_ONCE))):
                self._sent_s.popitem(last=False)
