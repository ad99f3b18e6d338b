"""The prediction of what workers have cached: what was sent there, for a while."""

from dynaplan.gateway.kv_routing.prefix_index import DROPPED_AT_ONCE, PrefixIndex


def test_of_a_prompt_that_does_not_fit_the_beginning_is_kept() -> None:
    index = PrefixIndex(largest_blocks=4, kept_share=1.0)
    index.record((1, 2, 3, 4, 5, 6), worker=7, now_s=0.0)
    assert index.overlaps((1, 2, 3, 4, 5, 6), now_s=0.0) == {7: 4}


def test_a_prompt_that_is_sent_again_counts_as_new() -> None:
    index = PrefixIndex(largest_blocks=4, kept_share=1.0)
    index.record((1, 2), worker=7, now_s=0.0)
    index.record((3, 4), worker=7, now_s=1.0)
    index.record((1, 2), worker=7, now_s=2.0)
    index.record((5, 6), worker=7, now_s=3.0)
    assert index.overlaps((1, 2), now_s=3.0) == {7: 2}
    assert index.overlaps((3, 4), now_s=3.0) == {}


def test_too_many_blocks_are_pruned_to_the_share_that_is_kept() -> None:
    index = PrefixIndex(largest_blocks=10, kept_share=0.5)
    index.record(range(10), worker=7, now_s=0.0)
    assert len(index) == 10
    index.record((10,), worker=7, now_s=0.0)
    assert len(index) == 5


def test_pruning_goes_in_slices_so_that_no_request_waits_for_it() -> None:
    index = PrefixIndex(largest_blocks=4 * DROPPED_AT_ONCE, kept_share=0.25)
    index.record(range(4 * DROPPED_AT_ONCE + 1), worker=7, now_s=0.0)
    assert len(index) == 3 * DROPPED_AT_ONCE + 1
    index.record((), worker=7, now_s=0.0)
    assert len(index) == 2 * DROPPED_AT_ONCE + 1
    index.record((), worker=7, now_s=0.0)
    index.record((), worker=7, now_s=0.0)
    index.record((), worker=7, now_s=0.0)
    assert len(index) == DROPPED_AT_ONCE


def test_a_worker_that_left_is_not_told_of() -> None:
    index = PrefixIndex()
    index.record((1, 2), worker=7, now_s=0.0)
    index.left(7)
    index.left(8)
    assert index.overlaps((1, 2), now_s=0.0) == {}
