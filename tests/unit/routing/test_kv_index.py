"""Reported and predicted blocks; ``tests/property/test_kv_*.py`` have the rest."""

from __future__ import annotations

import pytest

from dynaplan.engines.kv_events import CacheSnapshot, Cleared, KvEvent, Removed, Stored
from dynaplan.routing import kv_index as index_module
from dynaplan.routing.kv_index import (
    PRUNE_BLOCKS,
    SWEEP_BLOCKS,
    IndexSync,
    KvIndex,
    PrefixIndex,
)


def test_an_overlap_is_the_number_of_first_blocks_without_a_gap() -> None:
    index = KvIndex()
    index.add(1, [10, 11, 12])
    index.add(2, [10, 12, 13])
    index.add(3, [11, 12, 13])
    assert index.overlaps([10, 11, 12, 13]) == {1: 3, 2: 1}
    assert index.overlaps([99]) == {}
    assert index.overlaps([]) == {}


def test_events_that_follow_each_other_are_told_from_lost_ones() -> None:
    index = KvIndex()
    assert index.last_event(1) is None
    assert [index.is_next_event(1, event_id) for event_id in (0, 1, 3, 4)] == [True, True, False, True]
    assert index.last_event(1) == 4
    assert not index.is_next_event(2, 7), "whoever comes late has missed what was before"


def test_all_blocks_of_a_worker_can_be_replaced() -> None:
    index = KvIndex()
    index.add(1, [10, 11])
    index.clear(1)
    index.add(1, [20])
    index.continue_after(1, 41)
    assert index.overlaps([10]) == {}
    assert index.overlaps([20]) == {1: 1}
    assert index.is_next_event(1, 42)


def test_a_block_that_one_worker_gives_up_stays_with_the_others() -> None:
    index = KvIndex()
    index.add(1, [10])
    index.add(2, [10])
    index.remove(1, [10])
    assert index.overlaps([10]) == {2: 1}


def test_a_worker_that_left_is_forgotten_at_once_and_its_blocks_soon() -> None:
    index = KvIndex()
    index.add(1, range(2 * SWEEP_BLOCKS))
    index.add(2, range(5))
    index.remove_worker(1)
    index.remove_worker(3)
    assert index.workers == (2,)
    assert index.overlaps([0, 1]) == {2: 2}
    assert len(index) == 2 * SWEEP_BLOCKS
    while index.sweep():
        pass
    assert len(index) == 5
    assert not index.sweep()


def test_a_worker_that_comes_while_blocks_are_swept_has_only_its_own() -> None:
    index = KvIndex()
    index.add(1, range(10))
    index.remove_worker(1)
    assert index.sweep(4)
    index.add(2, [0])
    index.clear(2)
    index.add(2, [7])
    assert index.overlaps([9]) == {}
    assert index.overlaps([7]) == {2: 1}
    while index.sweep(4):
        pass
    assert len(index) == 1


def test_the_blocks_stored_longest_ago_go_first_when_there_are_too_many() -> None:
    index = KvIndex(max_blocks=32)
    index.add(1, range(32))
    index.add(1, [0])
    index.add(1, [100])
    assert len(index) <= 32
    assert index.overlaps([0]) == index.overlaps([100]) == index.overlaps([31]) == {1: 1}
    assert index.overlaps([1]) == {}


def test_what_is_said_of_unknown_blocks_and_workers_changes_nothing() -> None:
    index = KvIndex()
    index.remove(1, [10])
    index.clear(1)
    assert (index.workers, len(index)) == ((), 0)
    index.add(1, [10])
    index.remove(2, [10])
    assert index.overlaps([10]) == {1: 1}


def stored(worker: int, number: int, *blocks: int) -> KvEvent:
    return KvEvent(worker, number, Stored(None, blocks, blocks))


def current(worker: int, *blocks: int, event_id: int = -1) -> IndexSync:
    """A following that has the worker's snapshot."""
    following = IndexSync(KvIndex())
    following.set_workers([worker])
    for _ in following.load_snapshot(
        worker, following.request_snapshot(worker), CacheSnapshot(worker, event_id, blocks)
    ):
        pass
    assert following.is_current(worker)
    return following


def test_a_new_worker_is_asked_for_its_snapshot_once() -> None:
    following = IndexSync(KvIndex())
    following.set_workers([7, 8])
    assert following.missing_snapshots() == [7, 8]
    following.request_snapshot(7)
    assert following.missing_snapshots() == [8]
    assert not following.is_current(7)


def test_a_worker_that_stays_keeps_what_is_known_of_it() -> None:
    following = current(7, 1)
    following.set_workers([7, 8])
    assert following.is_current(7)
    assert following.missing_snapshots() == [8]


def test_events_while_a_snapshot_is_on_its_way_are_applied_after_it() -> None:
    following = IndexSync(KvIndex())
    following.set_workers([7])
    ticket = following.request_snapshot(7)
    following.apply(stored(7, 3, 1))
    following.apply(KvEvent(7, 4, Removed((2,))))
    for _ in following.load_snapshot(7, ticket, CacheSnapshot(7, 3, (1, 2))):
        pass
    assert following.is_current(7)
    assert following.index.overlaps([1, 2]) == {7: 1}


def test_an_event_that_is_missing_is_noticed_and_the_worker_asked_again() -> None:
    following = current(7, 1)
    following.apply(stored(7, 0, 2))
    assert following.is_current(7)
    following.apply(stored(7, 2, 3))
    assert not following.is_current(7)
    assert (following.missing_snapshots(), following.gaps) == ([7], 1)
    assert following.index.overlaps([1, 2]) == {7: 2}  # what was known is not forgotten
    for _ in following.load_snapshot(7, following.request_snapshot(7), CacheSnapshot(7, 1, (1,))):
        pass
    assert following.is_current(7)
    assert following.index.overlaps([3]) == {7: 1}


def test_an_event_that_comes_twice_counts_once() -> None:
    following = current(7, 1)
    following.apply(KvEvent(7, 0, Cleared()))
    following.apply(stored(7, 1, 2))
    following.apply(KvEvent(7, 0, Cleared()))
    assert following.is_current(7)
    assert following.index.overlaps([2]) == {7: 1}


def test_a_worker_that_has_gone_is_forgotten_and_its_late_events_are_ignored() -> None:
    following = current(7, 1, 2)
    following.set_workers([])
    following.apply(stored(7, 0, 3))
    assert following.index.overlaps([1]) == following.index.overlaps([3]) == {}
    assert not following.is_current(7)


def test_a_snapshot_that_is_not_wanted_any_more_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SLICE_BLOCKS", 1)
    following = IndexSync(KvIndex())
    following.set_workers([7])
    slices = following.load_snapshot(7, following.request_snapshot(7), CacheSnapshot(7, -1, (1, 2)))
    next(slices)
    following.set_workers([])
    assert list(slices) == []
    assert following.index.workers == ()
    assert list(following.load_snapshot(7, following.request_snapshot(7), CacheSnapshot(7, -1, (1, 2)))) == []


def test_another_workers_snapshot_is_refused() -> None:
    following = IndexSync(KvIndex())
    following.set_workers([7])
    with pytest.raises(ValueError, match="it is of instance 8, not of 7"):
        list(following.load_snapshot(7, following.request_snapshot(7), CacheSnapshot(8, -1, ())))


def test_after_an_interruption_every_worker_is_asked_again() -> None:
    following = current(7, 1)
    following.invalidate()
    assert not following.is_current(7)
    assert following.missing_snapshots() == [7]
    assert following.index.overlaps([1]) == {7: 1}


def test_an_answer_from_before_an_interruption_is_not_taken_over() -> None:
    following = IndexSync(KvIndex())
    following.set_workers([7])
    ticket = following.request_snapshot(7)
    following.apply(stored(7, 0, 2))
    following.invalidate()
    assert list(following.load_snapshot(7, ticket, CacheSnapshot(7, -1, (1,)))) == []
    assert not following.is_current(7)
    for _ in following.load_snapshot(7, following.request_snapshot(7), CacheSnapshot(7, 3, (1,))):
        pass
    assert following.is_current(7)
    assert following.index.overlaps([2]) == {}


def test_too_many_waiting_events_are_dropped_and_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_WAITING_EVENTS", 2)
    following = IndexSync(KvIndex())
    following.set_workers([7])
    ticket = following.request_snapshot(7)
    for number in range(3):
        following.apply(stored(7, number, number))
    for _ in following.load_snapshot(7, ticket, CacheSnapshot(7, -1, ())):
        pass
    assert not following.is_current(7)


def test_the_index_tells_how_many_first_blocks_a_worker_holds() -> None:
    index = PrefixIndex()
    index.record((1, 2, 3), worker=7, now_s=0.0)
    index.record((1,), worker=8, now_s=0.0)
    assert index.overlaps((1, 2, 9), now_s=1.0) == {7: 2, 8: 1}
    assert index.overlaps((9, 1, 2), now_s=1.0) == {}


def test_an_entry_expires() -> None:
    index = PrefixIndex(time_to_live_s=120.0)
    index.record((1,), worker=7, now_s=0.0)
    assert index.overlaps((1,), now_s=120.0) == {7: 1}
    assert index.overlaps((1,), now_s=120.1) == {}


def test_the_index_stays_within_its_cap_and_drops_the_oldest() -> None:
    index = PrefixIndex(max_blocks=2, kept_share=1.0)
    index.record((1, 2), worker=7, now_s=0.0)
    index.record((1, 3), worker=7, now_s=1.0)
    assert len(index) == 2
    assert index.overlaps((1,), now_s=1.0) == {7: 1}
    assert index.overlaps((2,), now_s=1.0) == {}


def test_of_a_prompt_that_does_not_fit_the_beginning_is_kept() -> None:
    index = PrefixIndex(max_blocks=4, kept_share=1.0)
    index.record((1, 2, 3, 4, 5, 6), worker=7, now_s=0.0)
    assert index.overlaps((1, 2, 3, 4, 5, 6), now_s=0.0) == {7: 4}


def test_a_prompt_that_is_sent_again_counts_as_new() -> None:
    index = PrefixIndex(max_blocks=4, kept_share=1.0)
    index.record((1, 2), worker=7, now_s=0.0)
    index.record((3, 4), worker=7, now_s=1.0)
    index.record((1, 2), worker=7, now_s=2.0)
    index.record((5, 6), worker=7, now_s=3.0)
    assert index.overlaps((1, 2), now_s=3.0) == {7: 2}
    assert index.overlaps((3, 4), now_s=3.0) == {}


def test_too_many_blocks_are_pruned_to_the_share_that_is_kept() -> None:
    index = PrefixIndex(max_blocks=10, kept_share=0.5)
    index.record(range(10), worker=7, now_s=0.0)
    assert len(index) == 10
    index.record((10,), worker=7, now_s=0.0)
    assert len(index) == 5


def test_pruning_goes_in_slices_so_that_no_request_waits_for_it() -> None:
    index = PrefixIndex(max_blocks=4 * PRUNE_BLOCKS, kept_share=0.25)
    index.record(range(4 * PRUNE_BLOCKS + 1), worker=7, now_s=0.0)
    assert len(index) == 3 * PRUNE_BLOCKS + 1
    index.record((), worker=7, now_s=0.0)
    assert len(index) == 2 * PRUNE_BLOCKS + 1
    index.record((), worker=7, now_s=0.0)
    index.record((), worker=7, now_s=0.0)
    index.record((), worker=7, now_s=0.0)
    assert len(index) == PRUNE_BLOCKS


def test_a_worker_that_left_is_not_told_of() -> None:
    index = PrefixIndex()
    index.record((1, 2), worker=7, now_s=0.0)
    index.remove_worker(7)
    index.remove_worker(8)
    assert index.overlaps((1, 2), now_s=0.0) == {}
