"""Which keys there are, and who sees them."""

from __future__ import annotations

from dynaplan.store.kubernetes_kv.documents import HeldLease, PodRecord, StoredKey
from dynaplan.store.kubernetes_kv.picture import ClusterPicture


def record(lease: int, **keys: int) -> PodRecord:
    """A pod's record; each key with its revision."""
    return PodRecord(
        {lease: HeldLease(10, {key: StoredKey("", number, lease) for key, number in keys.items()})}
    )


def test_the_keys_of_a_pod_are_seen_by_others_while_it_is_ready_and_by_itself_always() -> None:
    picture = ClusterPicture(pods={"a": record(1, k=5)})
    assert set(picture.seen_by("b")) == set()
    assert set(picture.seen_by("a")) == {"k"}
    assert set(ClusterPicture(pods=picture.pods, ready=frozenset({"a"})).seen_by("b")) == {"k"}
    assert picture.waiting() == ["a"]
    assert set(picture.all_keys()) == {"k"}


def test_a_shared_key_under_a_lease_counts_as_long_as_a_pod_has_the_lease() -> None:
    shared = {"lock": StoredKey("", 3, 1), "free": StoredKey("", 3)}
    assert set(ClusterPicture(shared, {"a": record(1)}).seen_by("b")) == {"lock", "free"}
    assert set(ClusterPicture(shared).seen_by("b")) == {"free"}


def test_of_a_key_in_two_places_the_newest_counts() -> None:
    shared = {"k": StoredKey("shared", 7)}
    for revision, lease in ((6, 0), (8, 1)):
        picture = ClusterPicture(shared, {"a": record(1, k=revision)}, frozenset({"a"}))
        assert picture.seen_by("b")["k"].lease == lease


def test_a_lease_has_one_holder_or_none() -> None:
    picture = ClusterPicture(pods={"a": record(1)})
    assert picture.holder(1) == ("a", 10)
    assert picture.holder(2) is None
    assert picture.waiting() == []
