from __future__ import annotations

from dynaplan.store.model import Deleted, KeyValue, Put
from dynaplan.store.nats_bucket import (
    BucketMessage,
    Entry,
    lease_message,
    lease_name,
    put_message,
    tombstone,
)
from dynaplan.store.nats_store import BucketMirror


def stored(message: BucketMessage, sequence: int) -> Entry:
    """The message as the server has it."""
    return Entry(message.name, message.data, sequence, message.headers)


def put(key: str, sequence: int, lease: int = 0) -> Entry:
    return stored(put_message(key, "v", lease), sequence)


def lease(number: int, sequence: int) -> Entry:
    return stored(lease_message(number, 10), sequence)


def expired(number: int, sequence: int) -> Entry:
    """The mark that the server itself writes at the end of a lease."""
    return Entry(lease_name(number), b"", sequence, {"Nats-Marker-Reason": "MaxAge", "Nats-TTL": "1s"})


def keys(mirror: BucketMirror, prefix: str = "") -> list[str]:
    return sorted(key for key in mirror.items if key.startswith(prefix))


def test_it_begins_with_what_is_there() -> None:
    mirror = BucketMirror([put("b", 2), put("a", 1), stored(tombstone("c"), 3)])
    assert keys(mirror) == ["a", "b"]
    assert keys(mirror, "b") == ["b"]


def test_a_change_is_told_once() -> None:
    mirror = BucketMirror([put("a", 5)])
    assert mirror.apply(put("a", 5)) == []
    assert mirror.apply(put("a", 6)) == [Put(KeyValue("a", "v", 6, 0))]
    assert mirror.apply(stored(tombstone("a"), 7)) == [Deleted("a")]
    assert mirror.apply(stored(tombstone("a"), 8)) == []


def test_the_keys_of_a_lease_end_with_it_in_the_order_of_their_writing() -> None:
    mirror = BucketMirror([lease(1, 1)])
    for sequence, key in enumerate("bac", 2):
        mirror.apply(put(key, sequence, 1))
    mirror.apply(put("b", 5, 1))
    mirror.apply(put("free", 6))
    mirror.apply(lease(1, 7))
    assert mirror.apply(expired(1, 8)) == [Deleted("a"), Deleted("c"), Deleted("b")]
    assert keys(mirror) == ["free"]
    assert set(mirror.orphans) == {"a", "b", "c"}
    assert mirror.leases == {}


def test_an_orphan_is_forgotten_when_it_is_deleted_or_written_again() -> None:
    mirror = BucketMirror([put("a", 1, 1), put("b", 2, 1)])
    assert keys(mirror) == []
    assert set(mirror.orphans) == {"a", "b"}
    assert mirror.apply(stored(tombstone("a"), 3)) == []
    assert mirror.apply(put("b", 4)) == [Put(KeyValue("b", "v", 4, 0))]
    assert mirror.orphans == {}


def test_a_key_that_was_written_before_the_last_renewal_of_its_lease_is_there() -> None:
    mirror = BucketMirror([put("a", 2, 1), lease(1, 9)])
    assert keys(mirror) == ["a"]
    assert mirror.apply(expired(1, 10)) == [Deleted("a")]


def test_a_key_comes_with_its_lease_when_that_is_told_later() -> None:
    mirror = BucketMirror([])
    assert mirror.apply(put("a", 2, 1)) == []
    assert mirror.apply(lease(1, 3)) == [Put(KeyValue("a", "v", 2, 1))]
    assert mirror.orphans == {}


def test_a_key_that_was_written_anew_without_its_lease_outlives_it() -> None:
    mirror = BucketMirror([lease(1, 1), lease(2, 2), put("a", 3, 1), put("b", 4, 1)])
    mirror.apply(put("a", 5))
    mirror.apply(put("b", 6, 2))
    assert mirror.apply(expired(1, 7)) == []
    assert keys(mirror) == ["a", "b"]
    assert mirror.apply(expired(2, 8)) == [Deleted("b")]


def test_a_write_under_a_lease_that_has_ended_deletes_what_was_there() -> None:
    mirror = BucketMirror([put("a", 1)])
    assert mirror.apply(put("a", 2, 9)) == [Deleted("a")]
    assert set(mirror.orphans) == {"a"}
