"""The KV blocks that workers hold, as their engines tell: stored, removed, cleared.

Blocks are known by their chained hashes (``block_hashes``), so that a prompt's cached beginning is the number
of its first blocks that a worker holds without a gap, and one flat mapping from hashes to workers is enough:
no tree is needed.

The workers of a block are bits of one number. A worker that leaves, or whose cache is cleared, only gives
its bit up, at once and however many blocks it held; ``sweep`` clears the bit out of the blocks later, a slice
at a time, because going through all blocks would hold every other request up. A bit that was given up is not
used again before that.

Every worker numbers its events. A number that does not follow the one before says that events were lost; the
blocks stored meanwhile are missed hits, the blocks removed meanwhile are hits that will not happen, and the
caller asks the worker for all its blocks (``replace``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

LARGEST_BLOCKS = 2_000_000
"""The largest number of blocks that are remembered: with eight workers about 250 MB."""

EVICTED_SHARE = 16
"""A sixteenth of all blocks is dropped at once, so that looking for the oldest ones costs little."""

SWEPT_AT_ONCE = 4096
"""Blocks that one call of ``sweep`` looks at: about 0.5 ms."""


class KvIndex:
    """Blocks to workers. When there are too many blocks, the least recently stored ones go first.

    Worker ids are any numbers, for example the ids of their leases.
    """

    def __init__(self, largest_blocks: int = LARGEST_BLOCKS) -> None:
        self._largest_blocks = largest_blocks
        self._holders: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        self._last_events: dict[int, int] = {}
        self._given_up = 0
        self._swept = 0
        self._sweeping: Iterator[int] | None = None

    def __len__(self) -> int:
        """The number of blocks that are remembered."""
        return len(self._holders)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that have told of their blocks, and have not left."""
        return tuple(self._bits)

    def last_event(self, worker: int) -> int | None:
        """Return the number of the worker's last event; None before the first."""
        return self._last_events.get(worker)

    def follows(self, worker: int, event_id: int) -> bool:
        """Note an event's number; return False when events before it are missing."""
        last = self._last_events.get(worker)
        self._last_events[worker] = event_id
        return event_id == (0 if last is None else last + 1)

    def stored(self, worker: int, hashes: Iterable[int]) -> None:
        """Note that the worker holds these blocks now."""
        bit = self._bit(worker)
        holders = self._holders
        for block in hashes:
            holders[block] = holders.pop(block, 0) | bit
        if len(holders) > self._largest_blocks:
            self._evict()

    def removed(self, worker: int, hashes: Iterable[int]) -> None:
        """Note that the worker holds these blocks no more; unknown ones are passed over."""
        bit = self._bits.get(worker, 0)
        holders = self._holders
        for block in hashes:
            held = holders.get(block, 0)
            if held & bit:
                if held == bit:
                    del holders[block]
                else:
                    holders[block] = held & ~bit

    def cleared(self, worker: int) -> None:
        """Note that the worker holds no block any more."""
        bit = self._bits.pop(worker, 0)
        if bit:
            self._given_up |= bit
            self._bit(worker)

    def left(self, worker: int) -> None:
        """Forget a worker and its blocks."""
        self._given_up |= self._bits.pop(worker, 0)
        self._last_events.pop(worker, None)

    def replace(self, worker: int, hashes: Iterable[int], event_id: int) -> None:
        """Take over all blocks that the worker holds after its event with that number."""
        self.cleared(worker)
        self.stored(worker, hashes)
        self.continue_after(worker, event_id)

    def continue_after(self, worker: int, event_id: int) -> None:
        """Note that the worker's blocks are those after its event with that number; -1: before the first."""
        self._bit(worker)
        self._last_events[worker] = event_id

    def overlaps(self, hashes: Sequence[int]) -> dict[int, int]:
        """Return by worker the number of first blocks that it holds without a gap; absent if none."""
        everybody = 0
        for bit in self._bits.values():
            everybody |= bit
        lost_at: list[tuple[int, int]] = []
        left, depth = everybody, 0
        holders = self._holders
        for block in hashes:
            held = holders.get(block, 0) & left
            if held != left:
                lost_at.append((left & ~held, depth))
                left = held
                if not held:
                    break
            depth += 1
        lost_at.append((left, depth))
        return {
            worker: count
            for worker, bit in self._bits.items()
            for bits, count in lost_at
            if bits & bit and count
        }

    def sweep(self, at_most: int = SWEPT_AT_ONCE) -> bool:
        """Clear bits that were given up out of some blocks; return False when nothing is left to clear."""
        if self._sweeping is None:
            if not self._given_up:
                return False
            self._swept = self._given_up
            self._sweeping = iter(list(self._holders))
        holders, kept, count = self._holders, ~self._swept, 0
        for block in islice(self._sweeping, at_most):
            count += 1
            held = holders.get(block, 0)
            if held & self._swept:
                if held & kept:
                    holders[block] = held & kept
                else:
                    del holders[block]
        if count < at_most:
            self._given_up &= kept
            self._sweeping = None
        return self._sweeping is not None or bool(self._given_up)

    def _bit(self, worker: int) -> int:
        """Return the worker's bit; a new worker gets the lowest one that nobody has or had lately."""
        bit = self._bits.get(worker)
        if bit is None:
            taken = self._given_up
            for other in self._bits.values():
                taken |= other
            bit = self._bits[worker] = ~taken & (taken + 1)
        return bit

    def _evict(self) -> None:
        too_many = len(self._holders) - self._largest_blocks
        for block in list(islice(self._holders, too_many + self._largest_blocks // EVICTED_SHARE)):
            del self._holders[block]
