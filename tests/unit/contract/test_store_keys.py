"""The keys of a deployment: desired counts and live settings."""

from __future__ import annotations

import pytest

from dynaplan.contract.store_keys import (
    LIVE_SETTINGS,
    DesiredCounts,
    by_name,
    first_to_leave,
    fleet_key,
    former_extensions,
    live_setting,
    live_settings_prefix,
    planner_prefix,
    scaling_key,
    scaling_prefix,
)
from dynaplan.graph.lifecycle import Role


def keys(**values: str) -> dict[str, str]:
    return {planner_prefix("ns") + name: value for name, value in values.items()}


def test_the_keys_of_a_namespace_are_those_of_the_protocol() -> None:
    assert planner_prefix("ns") == "v1/ns/planner/"
    assert fleet_key("ns") == "v1/ns/fleet"


def test_extensions_are_no_keys_of_the_protocol_and_one_prefix_has_both() -> None:
    assert scaling_key("ns", "holds") == "v1/ns/planner_extensions/holds"
    assert scaling_key("ns", "decision_id") == planner_prefix("ns") + "decision_id"
    for name in ("holds", "reservations", "leave_first", "store_id", "decision_id"):
        assert scaling_key("ns", name).startswith(scaling_prefix("ns"))


def test_extensions_are_read_where_the_version_before_had_them_unless_they_were_written_since() -> None:
    found = keys(holds="old", store_id="s", decision_id="3") | {scaling_key("ns", "holds"): "new"}
    assert by_name("ns", found) == {"holds": "new", "store_id": "s", "decision_id": "3"}
    assert former_extensions("ns", found) == {
        "v1/ns/planner/holds": "holds",
        "v1/ns/planner/store_id": "store_id",
    }
    assert by_name("ns", {"v1/ns/plannerx": "7", "v1/other/planner/holds": "x"}) == {}


def test_a_decision_is_read_from_its_keys() -> None:
    found = DesiredCounts.from_keys(
        "ns", keys(num_prefill_workers="2", num_decode_workers="3", decision_id="7")
    )
    assert found == DesiredCounts(2, 3, 7, -1)
    assert (found.of(Role.PREFILL), found.of(Role.DECODE)) == (2, 3)


@pytest.mark.parametrize("value", ["", "two", "1.5", "nan"])
def test_a_value_that_is_no_whole_number_is_not_set(value: str) -> None:
    assert DesiredCounts.from_keys("ns", keys(num_decode_workers=value)).num_decode_workers == -1


@pytest.mark.parametrize(
    ("decision_id", "scaled_decision_id", "is_pending", "next_id"),
    [(-1, -1, False, 0), (3, 2, True, 4), (3, 5, False, 6)],
)
def test_the_next_decision_is_above_every_id_and_a_decision_is_pending_until_acknowledged(
    decision_id: int, scaled_decision_id: int, is_pending: bool, next_id: int
) -> None:
    counts = DesiredCounts(1, 1, decision_id, scaled_decision_id)
    assert (counts.is_pending, counts.next_decision_id) == (is_pending, next_id)


@pytest.mark.parametrize(
    ("text", "name"), [("7 ns_Worker_1", "ns_Worker_1"), ("6 ns_Worker_1", ""), ("x", ""), ("", "")]
)
def test_the_worker_that_leaves_first_is_named_for_one_decision(text: str, name: str) -> None:
    assert first_to_leave("ns", keys(leave_first=text), 7) == name
    assert first_to_leave("ns", {}, 7) == ""


def test_the_keys_are_those_of_the_original_and_one_of_ours() -> None:
    keys = {live_settings_prefix("ns") + name for name in LIVE_SETTINGS}
    originals = {"max_local_prefill_length", "max_prefill_queue_size"}
    assert keys == {f"/ns/disagg_router/{name}" for name in originals | {"max_local_running"}}


@pytest.mark.parametrize(
    ("text", "number"), [("0", 0), ("1000", 1000), ("-1", None), ("", None), ("ten", None), ("1.5", None)]
)
def test_a_value_is_a_whole_number_from_0_on(text: str, number: int | None) -> None:
    assert live_setting(text) == number
