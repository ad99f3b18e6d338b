"""Which workers hold the KV blocks of a prompt's prefix: reported by their engines, or predicted.

``KvIndex`` has the blocks that engines report as stored, removed and cleared; ``IndexSync`` keeps it in step
with their events and snapshots. ``PrefixIndex`` predicts: it remembers which prompts were sent where.

**One flat mapping.** Blocks are known by their chained hashes (``block_hashes``), so that a prompt's cached
prefix is the number of its first blocks that a worker holds without a gap, and one mapping from hashes to
workers is enough: no tree is needed.

**Bits.** The workers of a block are bits of one number. A worker that leaves, or whose cache is cleared, only
gives its bit up, at once and however many blocks it held; ``sweep`` clears the bit out of the blocks later, a
slice at a time, because going through all blocks would delay every other request. A bit that was given up is
not used again before that.

**Events.** Every worker numbers its events. A worker's blocks are taken from a snapshot first, then from its
events as long as their numbers follow each other. Events that arrive while a snapshot is on its way wait, and
the ones that it does not contain are applied after it. A number that is skipped says that events were lost:
blocks stored meanwhile are missed hits, blocks removed meanwhile are hits that will not happen. The worker's
blocks are uncertain until the next snapshot; the index keeps what it knew, since most of it will still hold,
but ``is_current`` is False.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dynaplan.config.settings.frontend import RoutingSettings
from dynaplan.engines.kv_events import BlockChange, CacheSnapshot, KvEvent, Removed, Stored

MAX_BLOCKS = 2_000_000
"""The largest number of blocks that are remembered: with eight workers about 250 MB."""

EVICTED_SHARE = 16
"""A sixteenth of all blocks is dropped at once, so that looking for the oldest ones costs little."""

SWEEP_BLOCKS = 4096
"""Blocks that one call of ``sweep`` checks: about 0.5 ms."""


class KvIndex:
    """Which workers hold which blocks. Beyond ``max_blocks`` the least recently stored ones are dropped.

    Worker ids are any numbers, for example the ids of their leases.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        self._last_events: dict[int, int] = {}
        self._given_up = 0
        self._swept = 0
        self._sweeping: Iterator[int] | None = None

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that have reported blocks, and have not left."""
        return tuple(self._bits)

    def last_event(self, worker: int) -> int | None:
        """Return the sequence number of the worker's last event; None before the first."""
        return self._last_events.get(worker)

    def is_next_event(self, worker: int, event_id: int) -> bool:
        """Record an event's number; return whether it follows the worker's last one (the first is 0)."""
        last = self._last_events.get(worker)
        self._last_events[worker] = event_id
        return event_id == (0 if last is None else last + 1)

    def add(self, worker: int, hashes: Iterable[int]) -> None:
        bit = self._bit(worker)
        holders = self._holders
        for block in hashes:
            holders[block] = holders.pop(block, 0) | bit
        if len(holders) > self._max_blocks:
            self._evict()

    def remove(self, worker: int, hashes: Iterable[int]) -> None:
        """Remove blocks that the worker no longer holds; unknown ones are ignored."""
        bit = self._bits.get(worker, 0)
        holders = self._holders
        for block in hashes:
            held = holders.get(block, 0)
            if held & bit:
                if held == bit:
                    del holders[block]
                else:
                    holders[block] = held & ~bit

    def clear(self, worker: int) -> None:
        bit = self._bits.pop(worker, 0)
        if bit:
            self._given_up |= bit
            self._bit(worker)

    def remove_worker(self, worker: int) -> None:
        self._given_up |= self._bits.pop(worker, 0)
        self._last_events.pop(worker, None)

    def continue_after(self, worker: int, event_id: int) -> None:
        """Note that the next event of the worker is the one after that number; -1: its first, number 0."""
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

    def sweep(self, at_most: int = SWEEP_BLOCKS) -> bool:
        """Clear removed workers' marks from up to ``at_most`` blocks.

        Return False when nothing is left to clear.
        """
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
        """Return the worker's bit; a new worker gets the lowest one that is not in use or yet to be swept."""
        bit = self._bits.get(worker)
        if bit is None:
            taken = self._given_up
            for other in self._bits.values():
                taken |= other
            bit = self._bits[worker] = ~taken & (taken + 1)  # the lowest that is 0: 0b1011 -> 0b0100
        return bit

    def _evict(self) -> None:
        too_many = len(self._holders) - self._max_blocks
        for block in list(islice(self._holders, too_many + self._max_blocks // EVICTED_SHARE)):
            del self._holders[block]


SLICE_BLOCKS = 4096
"""Blocks of a snapshot that are taken over at once: about 1 ms."""

MAX_WAITING_EVENTS = 4096
"""Events of one worker that wait for its snapshot; beyond them all are dropped, and another one is needed."""


@dataclass(slots=True, eq=False)
class _Cache:
    """What is known of one worker's cache. ``ticket`` is the number of the open snapshot request; 0: none."""

    is_current: bool = False
    ticket: int = 0
    waiting: list[KvEvent] = field(default_factory=list)


class IndexSync:
    """Follows workers' caches: which of them the ``index`` has completely, and which snapshots it needs.

    It does no I/O: the caller asks ``missing_snapshots`` and ``request_snapshot``, and passes the answers to
    ``load_snapshot``. ``gaps`` counts the times when events of a worker were missing.
    """

    def __init__(self, index: KvIndex) -> None:
        self.index = index
        self.gaps = 0
        self._caches: dict[int, _Cache] = {}
        self._tickets = 0

    def set_workers(self, workers: Iterable[int]) -> None:
        """Set the workers: others are forgotten, with their blocks; new ones need a snapshot."""
        now = dict.fromkeys(workers)
        for worker in self._caches.keys() - now.keys():
            del self._caches[worker]
            self.index.remove_worker(worker)
        for worker in now:
            if worker not in self._caches:
                self._caches[worker] = _Cache()

    def invalidate(self) -> None:
        """Note that events of any worker may have been lost: every snapshot is needed again."""
        for cache in self._caches.values():
            cache.is_current, cache.ticket = False, 0
            cache.waiting.clear()

    def is_current(self, worker: int) -> bool:
        """Return whether the index has all that the worker has reported, as far as is known."""
        cache = self._caches.get(worker)
        return cache is not None and cache.is_current

    def missing_snapshots(self) -> list[int]:
        """Return the workers whose snapshots are needed and have not been asked for."""
        return [worker for worker, cache in self._caches.items() if not cache.is_current and not cache.ticket]

    def request_snapshot(self, worker: int) -> int:
        """Note that the worker is asked for its snapshot; return a ticket for ``load_snapshot``."""
        self._tickets += 1
        if cache := self._caches.get(worker):
            cache.ticket = self._tickets
        return self._tickets

    def is_requested(self, worker: int, ticket: int) -> bool:
        """Return whether the answer to the request with that ticket is still wanted."""
        cache = self._caches.get(worker)
        return cache is not None and cache.ticket == ticket

    def apply(self, event: KvEvent) -> None:
        """Apply an event of a known worker, or keep it until its snapshot is loaded.

        One that is old is dropped.
        """
        cache = self._caches.get(event.worker_id)
        if cache is None:
            return
        if cache.is_current:
            self._follow(cache, event)
        else:
            self._keep(cache, event)

    def load_snapshot(self, worker: int, ticket: int, snapshot: CacheSnapshot) -> Iterator[None]:
        """Take a snapshot over, a slice at each step; it ends early when the answer is not wanted any more.

        Raises ValueError at the first step for another worker's snapshot.
        """
        if snapshot.worker_id != worker:
            raise ValueError(f"it is of instance {snapshot.worker_id:x}, not of {worker:x}")
        if not self.is_requested(worker, ticket):
            return
        self.index.clear(worker)
        hashes = iter(snapshot.hashes)
        while piece := tuple(islice(hashes, SLICE_BLOCKS)):
            self.index.add(worker, piece)
            yield
            if not self.is_requested(worker, ticket):
                return
        self.index.continue_after(worker, snapshot.event_id)
        cache = self._caches[worker]
        cache.is_current, cache.ticket = True, 0
        waiting, cache.waiting = cache.waiting, []
        for event in waiting:
            self.apply(event)

    def _follow(self, cache: _Cache, event: KvEvent) -> None:
        last = self.index.last_event(event.worker_id)
        if last is not None and event.event_id <= last:
            return  # it came twice, or the snapshot has it
        if not self.index.is_next_event(event.worker_id, event.event_id):
            self.gaps += 1
            cache.is_current = False
            self._keep(cache, event)
            return
        self._apply(event.worker_id, event.change)

    def _keep(self, cache: _Cache, event: KvEvent) -> None:
        if len(cache.waiting) >= MAX_WAITING_EVENTS:
            cache.waiting.clear()
        cache.waiting.append(event)

    def _apply(self, worker: int, change: BlockChange) -> None:
        match change:
            case Stored(_, hashes, _):
                self.index.add(worker, hashes)
            case Removed(hashes):
                self.index.remove(worker, hashes)
            case _:
                self.index.clear(worker)


PRUNE_BLOCKS = 4096
"""Blocks that one call of ``record`` drops at most beyond the surplus: about 0.5 ms."""

_SPREAD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_NEVER = float("-inf")


class PrefixIndex:
    """Remembers when each block was last sent to each worker, to predict what their caches hold.

    Engines' evictions are not known here, so an entry expires, and the least recently used goes first.
    Source: the approximate mode of Dynamo's KV router (time to live 120 s, 2**20 blocks, pruned to 80 %).

    A block is counted once for each worker that it was sent to. Its key is its hash, exclusive-or the
    worker's mark: one number is half as large as a pair. Of a prompt the end is dropped first, because a
    beginning can be used without it and not the other way round.
    """

    def __init__(
        self,
        time_to_live_s: float = RoutingSettings.router_ttl_s,
        max_blocks: int = RoutingSettings.router_max_tree_size,
        kept_share: float = RoutingSettings.router_prune_target_ratio,
    ) -> None:
        self._time_to_live_s = time_to_live_s
        self._max_blocks = max_blocks
        self._target_blocks = max(1, int(max_blocks * kept_share))
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

    def remove_worker(self, worker: int) -> None:
        """Forget a worker; its blocks expire."""
        self._marks.pop(worker, None)

    def _prune(self) -> None:
        """Drop the oldest entries beyond ``max_blocks``, and a slice more on the way to the target."""
        size = len(self._sent_s)
        too_many = size - self._max_blocks
        self._is_pruning = too_many > 0 or (self._is_pruning and size > self._target_blocks)
        if self._is_pruning:
            for _ in range(max(too_many, min(size - self._target_blocks, PRUNE_BLOCKS))):
                self._sent_s.popitem(last=False)
