from __future__ import annotations

import pytest

from dynaplan.fleet.store_keys import DesiredCounts, first_to_leave, fleet_key, planner_prefix
from dynaplan.graph.lifecycle import Role


def keys(**values: str) -> dict[str, str]:
    return {planner_prefix("ns") + name: value for name, value in values.items()}


def test_the_keys_of_a_namespace_are_those_of_the_protocol() -> None:
    assert planner_prefix("ns") == "v1/ns/planner/"
    assert fleet_key("ns") == "v1/ns/fleet"


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
