"""The removals that the published fleet tells of."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.fleet.rules.reconcile import REMOVALS, Removal, removals_in

ONE = Removal("ns_VllmWorker_1", 1_700_000_000.5, "1 of 2 VllmWorker wanted")


def test_what_is_published_is_read() -> None:
    assert removals_in({REMOVALS: [ONE.to_json()]}) == (ONE,)


@pytest.mark.parametrize("listed", [None, {}, "x", 5, [5], [{}], [{**ONE.to_json(), "why": 7}]])
def test_a_removal_that_cannot_be_read_is_left_out(listed: Any) -> None:
    assert removals_in({REMOVALS: listed}) == ()
