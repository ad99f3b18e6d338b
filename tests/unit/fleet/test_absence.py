"""What is published of an absence is told to clients, and whatever else is written there is none."""

from __future__ import annotations

import json

import pytest

from dynaplan.fleet.rules.absence import ABSENT, Absence, absence_in


@pytest.mark.parametrize(
    ("absence", "told", "retry_after_s"),
    [
        (Absence("It has ended", 108), "It has ended; it is started again in 8 s.", 9),
        (Absence("It has ended", 99), "It has ended; it is being started again.", 1),
        (Absence("It has ended"), "It has ended; it is being started again.", 1),
        (Absence("It cannot start", None), "It cannot start", 60),
    ],
)
def test_a_client_is_told_why_and_when(absence: Absence, told: str, retry_after_s: int) -> None:
    assert absence.told(100.0) == told
    assert absence.retry_after_s(100.0) == retry_after_s
    assert absence_in(json.dumps({ABSENT: {"W": absence.to_json()}}), "W") == absence


@pytest.mark.parametrize(
    "fleet",
    [
        "",
        "[]",
        "{}",
        '{"absent": 5}',
        '{"absent": {"W": 5}}',
        '{"absent": {"W": {}}}',
        '{"absent": {"W": {"why": "x", "retry_unix_s": "soon"}}}',
    ],
)
def test_what_cannot_be_read_is_no_absence(fleet: str) -> None:
    assert absence_in(fleet, "W") is None
