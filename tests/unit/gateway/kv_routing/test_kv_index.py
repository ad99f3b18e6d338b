"""The index of KV blocks: overlaps, lost events, the bound on memory."""

from __future__ import annotations

from dynaplan.gateway.kv_routing.kv_index import SWEPT_AT_ONCE, KvIndex


def test_an_overlap_is_the_number_of_first_blocks_without_a_gap() -> None:
    index = KvIndex()
    index.stored(1, [10, 11, 12])
    index.stored(2, [10, 12, 13])
    index.stored(3, [11, 12, 13])
    assert index.overlaps([10, 11, 12, 13]) == {1: 3, 2: 1}
    assert index.overlaps([99]) == {}
    assert index.overlaps([]) == {}


def test_events_that_follow_each_other_are_told_from_lost_ones() -> None:
    index = KvIndex()
    assert index.last_event(1) is None
    assert [index.follows(1, event_id) for event_id in (0, 1, 3, 4)] == [True, True, False, True]
    assert index.last_event(1) == 4
    assert not index.follows(2, 7), "whoever comes late has missed what was before"


def test_all_blocks_of_a_worker_can_be_replaced() -> None:
    index = KvIndex()
    index.stored(1, [10, 11])
    index.replace(1, [20], 41)
    assert index.overlaps([10]) == {}
    assert index.overlaps([20]) == {1: 1}
    assert index.follows(1, 42)


def test_a_block_that_one_worker_gives_up_stays_with_the_others() -> None:
    index = KvIndex()
    index.stored(1, [10])
    index.stored(2, [10])
    index.removed(1, [10])
    assert index.overlaps([10]) == {2: 1}


def test_a_worker_that_left_is_forgotten_at_once_and_its_blocks_soon() -> None:
    index = KvIndex()
    index.stored(1, range(2 * SWEPT_AT_ONCE))
    index.stored(2, range(5))
    index.left(1)
    index.left(3)
    assert index.workers == (2,)
    assert index.overlaps([0, 1]) == {2: 2}
    assert len(index) == 2 * SWEPT_AT_ONCE
    while index.sweep():
        pass
    assert len(index) == 5
    assert not index.sweep()


def test_a_worker_that_comes_while_blocks_are_swept_has_only_its_own() -> None:
    index = KvIndex()
    index.stored(1, range(10))
    index.left(1)
    assert index.sweep(4)
    index.stored(2, [0])
    index.cleared(2)
    index.stored(2, [7])
    assert index.overlaps([9]) == {}
    assert index.overlaps([7]) == {2: 1}
    while index.sweep(4):
        pass
    assert len(index) == 1


def test_the_blocks_stored_longest_ago_go_first_when_there_are_too_many() -> None:
    index = KvIndex(largest_blocks=32)
    index.stored(1, range(32))
    index.stored(1, [0])
    index.stored(1, [100])
    assert len(index) <= 32
    assert index.overlaps([0]) == index.overlaps([100]) == index.overlaps([31]) == {1: 1}
    assert index.overlaps([1]) == {}


def test_what_is_said_of_unknown_blocks_and_workers_changes_nothing() -> None:
    index = KvIndex()
    index.removed(1, [10])
    index.cleared(1)
    assert (index.workers, len(index)) == ((), 0)
    index.stored(1, [10])
    index.removed(2, [10])
    assert index.overlaps([10]) == {1: 1}
