"""The rules by which an index follows workers; ``tests/property/test_kv_following.py`` has the rest."""

from __future__ import annotations

import pytest

from dynaplan.engines.kv_events import CacheSnapshot, Cleared, KvEvent, Removed, Stored
from dynaplan.gateway.kv_routing import kv_following
from dynaplan.gateway.kv_routing.kv_following import KvFollowing
from dynaplan.gateway.kv_routing.kv_index import KvIndex


def stored(worker: int, number: int, *blocks: int) -> KvEvent:
    return KvEvent(worker, number, Stored(None, blocks, blocks))


def current(worker: int, *blocks: int, event_id: int = -1) -> KvFollowing:
    """A following that has the worker's snapshot."""
    following = KvFollowing(KvIndex())
    following.present([worker])
    for _ in following.replace(worker, following.ask(worker), CacheSnapshot(worker, event_id, blocks)):
        pass
    assert following.is_current(worker)
    return following


def test_a_new_worker_is_asked_for_its_snapshot_once() -> None:
    following = KvFollowing(KvIndex())
    following.present([7, 8])
    assert following.wanting() == [7, 8]
    following.ask(7)
    assert following.wanting() == [8]
    assert not following.is_current(7)


def test_a_worker_that_stays_keeps_what_is_known_of_it() -> None:
    following = current(7, 1)
    following.present([7, 8])
    assert following.is_current(7)
    assert following.wanting() == [8]


def test_events_while_a_snapshot_is_on_its_way_are_applied_after_it() -> None:
    following = KvFollowing(KvIndex())
    following.present([7])
    ticket = following.ask(7)
    following.take(stored(7, 3, 1))
    following.take(KvEvent(7, 4, Removed((2,))))
    for _ in following.replace(7, ticket, CacheSnapshot(7, 3, (1, 2))):
        pass
    assert following.is_current(7)
    assert following.index.overlaps([1, 2]) == {7: 1}


def test_an_event_that_is_missing_is_noticed_and_the_worker_asked_again() -> None:
    following = current(7, 1)
    following.take(stored(7, 0, 2))
    assert following.is_current(7)
    following.take(stored(7, 2, 3))
    assert not following.is_current(7)
    assert (following.wanting(), following.gaps) == ([7], 1)
    assert following.index.overlaps([1, 2]) == {7: 2}  # what was known is not forgotten
    for _ in following.replace(7, following.ask(7), CacheSnapshot(7, 1, (1,))):
        pass
    assert following.is_current(7)
    assert following.index.overlaps([3]) == {7: 1}


def test_an_event_that_comes_twice_counts_once() -> None:
    following = current(7, 1)
    following.take(KvEvent(7, 0, Cleared()))
    following.take(stored(7, 1, 2))
    following.take(KvEvent(7, 0, Cleared()))
    assert following.is_current(7)
    assert following.index.overlaps([2]) == {7: 1}


def test_a_worker_that_has_gone_is_forgotten_and_its_late_events_are_ignored() -> None:
    following = current(7, 1, 2)
    following.present([])
    following.take(stored(7, 0, 3))
    assert following.index.overlaps([1]) == following.index.overlaps([3]) == {}
    assert not following.is_current(7)


def test_a_snapshot_that_is_not_wanted_any_more_is_not_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_following, "SLICE_BLOCKS", 1)
    following = KvFollowing(KvIndex())
    following.present([7])
    slices = following.replace(7, following.ask(7), CacheSnapshot(7, -1, (1, 2)))
    next(slices)
    following.present([])
    assert list(slices) == []
    assert following.index.workers == ()
    assert list(following.replace(7, following.ask(7), CacheSnapshot(7, -1, (1, 2)))) == []


def test_another_workers_snapshot_is_refused() -> None:
    following = KvFollowing(KvIndex())
    following.present([7])
    with pytest.raises(ValueError, match="it is of instance 8, not of 7"):
        list(following.replace(7, following.ask(7), CacheSnapshot(8, -1, ())))


def test_after_an_interruption_every_worker_is_asked_again() -> None:
    following = current(7, 1)
    following.interrupted()
    assert not following.is_current(7)
    assert following.wanting() == [7]
    assert following.index.overlaps([1]) == {7: 1}


def test_an_answer_from_before_an_interruption_is_not_taken_over() -> None:
    following = KvFollowing(KvIndex())
    following.present([7])
    ticket = following.ask(7)
    following.take(stored(7, 0, 2))
    following.interrupted()
    assert list(following.replace(7, ticket, CacheSnapshot(7, -1, (1,)))) == []
    assert not following.is_current(7)
    for _ in following.replace(7, following.ask(7), CacheSnapshot(7, 3, (1,))):
        pass
    assert following.is_current(7)
    assert following.index.overlaps([2]) == {}


def test_too_many_waiting_events_are_dropped_and_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_following, "MOST_WAITING", 2)
    following = KvFollowing(KvIndex())
    following.present([7])
    ticket = following.ask(7)
    for number in range(3):
        following.take(stored(7, number, number))
    for _ in following.replace(7, ticket, CacheSnapshot(7, -1, ())):
        pass
    assert not following.is_current(7)
