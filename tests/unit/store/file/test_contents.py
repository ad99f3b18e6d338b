"""Contents: a header is a record of everything."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.process.identity import LeaseOwner, ProcessIdentity
from dynaplan.store.file.contents import FileLease, StoreContents
from dynaplan.store.model import Deleted, KeyValue, Put

OWNERS = [LeaseOwner(ProcessIdentity(pid, 5, "boot"), 1).to_record() for pid in (1, 2)]
KEYS, LEASES = st.sampled_from("abc"), st.sampled_from([1, 2])


def empty() -> StoreContents:
    return StoreContents({"identity": "x", "number": 0, "leases": [], "items": []})


def grant(lease: int, owner: int = 0) -> dict[str, Any]:
    return {"grant": {"lease": lease, "ttl_s": 10 * lease, "slot": lease, "owner": OWNERS[owner]}}


CHANGES = st.lists(
    st.one_of(
        st.builds(lambda key, lease: {"put": {key: "v"}, "lease": lease}, KEYS, st.sampled_from([0, 1, 2])),
        st.builds(lambda key: {"delete": [key]}, KEYS),
        st.builds(grant, LEASES, st.sampled_from([0, 1])),
        st.builds(
            lambda lease, owner: {"own": lease, "owner": owner}, LEASES, st.sampled_from([*OWNERS, None])
        ),
        st.builds(lambda lease: {"end": lease, "delete": []}, LEASES),
    ),
    max_size=12,
)


@given(CHANGES)
def test_contents_made_of_the_header_are_the_same(changes: list[dict[str, Any]]) -> None:
    contents = empty()
    for number, change in enumerate(changes, 1):
        contents.apply({"number": number, **change})
    again = StoreContents(contents.header())
    assert again.header() == contents.header()
    assert (again.items, again.leases, again.keys_of) == (contents.items, contents.leases, contents.keys_of)
    assert (again.owners, again.ttls_s) == (contents.owners, contents.ttls_s)


def test_a_record_tells_what_it_changes_and_its_number_is_the_revision() -> None:
    contents = empty()
    contents.apply({"number": 1, **grant(1)})
    item = KeyValue("a", "v", 2, 1)
    assert contents.apply({"number": 2, "put": {"a": "v"}, "lease": 1}) == [Put(item)]
    assert contents.keys_of == {1: {"a"}}
    assert contents.apply({"number": 3, "end": 1, "delete": ["a"]}) == [Deleted("a")]
    assert not contents.items
    assert not contents.leases
    assert not contents.owners


def test_a_key_that_is_written_without_its_lease_leaves_it() -> None:
    contents = empty()
    contents.apply({"number": 1, **grant(1)})
    contents.apply({"number": 2, "put": {"a": "v"}, "lease": 1})
    contents.apply({"number": 3, "put": {"a": "w"}, "lease": 0})
    assert contents.keys_of == {}


def test_a_slot_that_a_lease_has_left_is_free_again() -> None:
    contents = empty()
    for slot in range(3):
        lease = FileLease(10 + slot, 5, contents.free_slot(), None)
        assert lease.slot == slot
        contents.apply({"number": slot + 1, "grant": lease.to_record()})
    contents.apply({"number": 4, "end": 11, "delete": []})
    assert contents.free_slot() == 1
