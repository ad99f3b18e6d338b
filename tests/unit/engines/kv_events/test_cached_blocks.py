"""A worker's blocks, and the numbers of its events."""

from __future__ import annotations

from dynaplan.engines.kv_events.cached_blocks import CachedBlocks
from dynaplan.engines.kv_events.wire import CacheSnapshot, Cleared, KvEvent, Removed, Stored

STORED = Stored(None, (1, 2, 3), (1, 20, 30))


def test_events_are_numbered_from_0_without_gaps() -> None:
    blocks = CachedBlocks()
    assert blocks.events(7, [STORED, Removed((3,))]) == [KvEvent(7, 0, STORED), KvEvent(7, 1, Removed((3,)))]
    assert blocks.events(7, [Cleared()]) == [KvEvent(7, 2, Cleared())]


def test_a_snapshot_has_what_is_cached_after_the_last_event() -> None:
    blocks = CachedBlocks()
    assert blocks.snapshot(7) == CacheSnapshot(7, -1, ())
    blocks.events(7, [STORED, Removed((2, 9))])
    assert blocks.snapshot(7) == CacheSnapshot(7, 1, (1, 3))
    blocks.events(7, [Cleared()])
    assert blocks.snapshot(7) == CacheSnapshot(7, 2, ())


def test_a_worker_without_an_instance_id_has_blocks_and_no_events() -> None:
    blocks = CachedBlocks()
    assert blocks.events(0, [STORED]) == []
    assert len(blocks) == 3
    assert blocks.snapshot(7) == CacheSnapshot(7, -1, (1, 2, 3))


def test_under_another_instance_id_numbers_begin_again_and_blocks_stay() -> None:
    blocks = CachedBlocks()
    blocks.events(7, [STORED, Cleared(), STORED])
    assert blocks.snapshot(8) == CacheSnapshot(8, -1, (1, 2, 3))
    assert blocks.events(8, [Removed((1,))]) == [KvEvent(8, 0, Removed((1,)))]
