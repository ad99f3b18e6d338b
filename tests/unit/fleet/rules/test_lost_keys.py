"""Which keys are written down, which are lost, and which were deleted."""

from __future__ import annotations

import pytest

from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.fleet.rules.lost_keys import STORE_ID, PersistedKeys, compare

AT_2 = RoleHolds(decode=Hold(2, 2, by="alice")).to_text()
ID = {STORE_ID: "5f"}
LENGTH, QUEUE = {"max_local_prefill_length": "10"}, {"max_prefill_queue_size": "3"}


def test_good_values_of_known_keys_are_kept() -> None:
    found = PersistedKeys(
        {**ID, "holds": AT_2, "decision_id": "8", "scaled_decision_id": "7"}, {**LENGTH, "x": "1"}
    )
    seen = compare(PersistedKeys(), found)
    assert seen.kept == PersistedKeys({**ID, "holds": AT_2, "decision_id": "8"}, LENGTH)
    assert not seen.lost
    assert not seen.is_new_store


@pytest.mark.parametrize(
    ("name", "text"),
    [("holds", '{"decode": 7}'), ("num_decode_workers", "--5"), ("decision_id", "-1"), (STORE_ID, "")],
)
def test_a_planners_key_with_nonsense_keeps_its_last_value(name: str, text: str) -> None:
    seen = compare(PersistedKeys({**ID, name: "before"}), PersistedKeys({**ID, name: text}))
    assert seen.kept.planner[name] == "before"
    assert not seen.lost


def test_a_planners_key_that_is_missing_is_lost_whether_the_store_is_new_or_not() -> None:
    kept = PersistedKeys({**ID, "holds": AT_2})
    assert compare(kept, PersistedKeys(ID)).lost == PersistedKeys({"holds": AT_2})
    assert compare(kept, PersistedKeys()).lost == PersistedKeys({**ID, "holds": AT_2})


def test_a_live_setting_that_is_missing_was_deleted_unless_the_stores_id_is_gone_too() -> None:
    kept = PersistedKeys(ID, {**LENGTH, **QUEUE})
    deleted = compare(kept, PersistedKeys(ID, QUEUE))
    assert (deleted.kept, bool(deleted.lost), deleted.is_new_store) == (
        PersistedKeys(ID, QUEUE),
        False,
        False,
    )
    emptied = compare(kept, PersistedKeys())
    assert (emptied.kept, emptied.lost, emptied.is_new_store) == (kept, kept, True)


def test_a_setting_that_was_made_in_the_new_store_already_stays() -> None:
    changed = {"max_local_prefill_length": "99"}
    seen = compare(PersistedKeys(ID, {**LENGTH, **QUEUE}), PersistedKeys({}, changed))
    assert seen.kept.live == {**changed, **QUEUE}
    assert seen.lost.live == QUEUE


@pytest.mark.parametrize("text", ["", "-1", "ten", "1.5"])
def test_a_live_setting_that_cannot_be_read_is_not_kept(text: str) -> None:
    found = PersistedKeys(ID, {"max_prefill_queue_size": text})
    assert compare(PersistedKeys(ID, QUEUE), found).kept == PersistedKeys(ID)


def test_a_store_that_never_had_an_id_is_not_new() -> None:
    seen = compare(PersistedKeys({}, LENGTH), PersistedKeys())
    assert (seen.is_new_store, bool(seen.lost)) == (False, False)
