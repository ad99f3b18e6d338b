"""The KV blocks that one worker's engine holds, as its worker knows them, and the numbers of its events."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.engines.kv_events.wire import CacheSnapshot, Change, KvEvent, Removed, Stored


class CachedBlocks:
    """Takes changes over, and numbers the events that tell of them.

    ``worker_id`` is the worker's instance id, 0 while it has none: then there are no events. Under another
    id the numbers begin with 0 again; what is cached stays.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}
        self._worker_id = 0
        self._next_event = 0

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self._blocks)

    def events(self, worker_id: int, changes: Sequence[Change]) -> list[KvEvent]:
        """Take the changes over; return the events that tell of them."""
        self._belong_to(worker_id)
        for change in changes:
            self._apply(change)
        if not worker_id:
            return []
        first = self._next_event
        self._next_event += len(changes)
        return [KvEvent(worker_id, number, change) for number, change in enumerate(changes, first)]

    def snapshot(self, worker_id: int) -> CacheSnapshot:
        """Return all blocks at this moment."""
        self._belong_to(worker_id)
        return CacheSnapshot(worker_id, self._next_event - 1, tuple(self._blocks))

    def _belong_to(self, worker_id: int) -> None:
        if worker_id != self._worker_id:
            self._worker_id, self._next_event = worker_id, 0

    def _apply(self, change: Change) -> None:
        match change:
            case Stored(_, hashes, _):
                self._blocks.update(dict.fromkeys(hashes))
            case Removed(hashes):
                for block in hashes:
                    self._blocks.pop(block, None)
            case _:
                self._blocks.clear()
