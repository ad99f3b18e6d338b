"""Keeping an index of KV blocks current by events and snapshots: the rules, without the waiting.

A worker's blocks are taken over from a snapshot first, then from its events as long as their numbers follow
each other. Events that come while a snapshot is on its way wait, and the ones that it does not contain are
applied after it. A number that is skipped makes the worker's blocks uncertain until the next snapshot; the
index keeps what it knew, since most of it will still hold, but ``is_current`` is False.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from dynaplan.engines.kv_events import CacheSnapshot, Change, KvEvent, Removed, Stored
from dynaplan.gateway.kv_routing.kv_index import KvIndex

SLICE_BLOCKS = 4096
"""Blocks of a snapshot that are taken over at once: about 1 ms."""

MOST_WAITING = 4096
"""Events of one worker that wait for its snapshot; beyond them all are dropped, and another one is needed."""


@dataclass(slots=True, eq=False)
class _Cache:
    """The knowledge of one worker. ``ticket`` numbers the questions for snapshots; 0: none is open."""

    is_current: bool = False
    ticket: int = 0
    waiting: list[KvEvent] = field(default_factory=list)


class KvFollowing:
    """Follows workers' caches: which of them ``index`` knows whole, and which snapshots are to be asked for.

    It asks nobody itself: the shell calls ``wanting`` and ``ask``, and brings the answers to ``replace``.
    ``gaps`` counts the times when events of a worker were missing.
    """

    def __init__(self, index: KvIndex) -> None:
        self.index = index
        self.gaps = 0
        self._caches: dict[int, _Cache] = {}
        self._tickets = 0

    def present(self, workers: Iterable[int]) -> None:
        """Take over which workers there are: forget the ones that have gone, begin with new ones."""
        now = dict.fromkeys(workers)
        for worker in self._caches.keys() - now.keys():
            del self._caches[worker]
            self.index.left(worker)
        for worker in now:
            if worker not in self._caches:
                self._caches[worker] = _Cache()

    def interrupted(self) -> None:
        """Note that events of any worker may have been lost: every snapshot is needed anew."""
        for cache in self._caches.values():
            cache.is_current, cache.ticket = False, 0
            cache.waiting.clear()

    def is_current(self, worker: int) -> bool:
        """Tell whether the index has all that the worker told, as far as is known."""
        cache = self._caches.get(worker)
        return cache is not None and cache.is_current

    def wanting(self) -> list[int]:
        """Return the workers whose snapshots are needed and not asked for."""
        return [worker for worker, cache in self._caches.items() if not cache.is_current and not cache.ticket]

    def ask(self, worker: int) -> int:
        """Note that the worker is asked for its snapshot; return the question's number."""
        self._tickets += 1
        if cache := self._caches.get(worker):
            cache.ticket = self._tickets
        return self._tickets

    def is_open(self, worker: int, ticket: int) -> bool:
        """Tell whether the answer to that question is still wanted."""
        cache = self._caches.get(worker)
        return cache is not None and cache.ticket == ticket

    def take(self, event: KvEvent) -> None:
        """Take one event over, or keep it for after the snapshot."""
        cache = self._caches.get(event.worker_id)
        if cache is None:
            return
        if cache.is_current:
            self._follow(cache, event)
        else:
            self._keep(cache, event)

    def replace(self, worker: int, ticket: int, snapshot: CacheSnapshot) -> Iterator[None]:
        """Take a snapshot over, a slice at each step; it ends early when the answer is not wanted any more.

        Raises ValueError at the first step for another worker's snapshot.
        """
        if snapshot.worker_id != worker:
            raise ValueError(f"it is of instance {snapshot.worker_id:x}, not of {worker:x}")
        if not self.is_open(worker, ticket):
            return
        self.index.cleared(worker)
        hashes = iter(snapshot.hashes)
        while piece := tuple(islice(hashes, SLICE_BLOCKS)):
            self.index.stored(worker, piece)
            yield
            if not self.is_open(worker, ticket):
                return
        self.index.continue_after(worker, snapshot.event_id)
        cache = self._caches[worker]
        cache.is_current, cache.ticket = True, 0
        waiting, cache.waiting = cache.waiting, []
        for event in waiting:
            self.take(event)

    def _follow(self, cache: _Cache, event: KvEvent) -> None:
        last = self.index.last_event(event.worker_id)
        if last is not None and event.event_id <= last:
            return  # it came twice, or the snapshot has it
        if not self.index.follows(event.worker_id, event.event_id):
            self.gaps += 1
            cache.is_current = False
            self._keep(cache, event)
            return
        self._apply(event.worker_id, event.change)

    def _keep(self, cache: _Cache, event: KvEvent) -> None:
        if len(cache.waiting) >= MOST_WAITING:
            cache.waiting.clear()
        cache.waiting.append(event)

    def _apply(self, worker: int, change: Change) -> None:
        match change:
            case Stored(_, hashes, _):
                self.index.stored(worker, hashes)
            case Removed(hashes):
                self.index.removed(worker, hashes)
            case _:
                self.index.cleared(worker)
