"""Holds as they are written, read, and said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynaplan.fleet.counts import Targets
from dynaplan.fleet.holds import MAX_HELD_WORKERS, MAX_HOLD_S, Hold, RoleHolds
from dynaplan.graph.lifecycle import Role
from dynaplan.util.durations import wall_clock

NOON_S = 1795348800.0
AT_3 = Hold(3, 3, NOON_S, NOON_S + 7200, "2026-11-22 14:00 UTC", "alice", 1000, 4711, "box")
NIGHT = Hold(1, 1, by="alice", at="22:00-06:00", zone="UTC")


@pytest.mark.parametrize(
    "holds",
    [
        RoleHolds(),
        RoleHolds(decode=AT_3),
        RoleHolds(Hold(0, 0), Hold(2)),
        RoleHolds(prefill=Hold(at_most=4)),
        RoleHolds(decode=NIGHT),
    ],
)
def test_holds_read_back_as_they_were_written(holds: RoleHolds) -> None:
    assert RoleHolds.from_text(holds.to_text()) == holds
    assert RoleHolds.from_json(holds.to_json()) == holds


def test_a_missing_key_holds_nothing_and_unknown_fields_are_ignored() -> None:
    assert RoleHolds.from_text("") == RoleHolds.from_text("{}") == RoleHolds()
    assert RoleHolds.from_text('{"planner": 7, "decode": {"at_least": 2, "why": "a demo"}}') == RoleHolds(
        decode=Hold(2)
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"at_least": -1}, "at_least"),
        ({"at_least": 2.5}, "at_least"),
        ({"at_most": 2}, "at least 3 and at most 2"),
        ({"at_least": MAX_HELD_WORKERS + 1}, "at most 10000 workers"),
        ({"until": 7}, "'until' is 7"),
        ({"until_s": "tomorrow"}, "expected a number"),
        ({"until_s": NOON_S}, "a time up to a year after"),
        ({"until_s": NOON_S + MAX_HOLD_S + 1}, "a time up to a year after"),
        ({"by": "a" * 101}, "printable"),
        ({"host": "a\nb"}, "printable"),
        ({"pid": "x"}, "pid"),
        ({"at": "always"}, "expected hours of every day"),
    ],
    ids=str,
)
def test_what_is_no_hold_is_refused_by_the_name_of_the_field(change: dict[str, Any], said: str) -> None:
    document = RoleHolds(decode=AT_3).to_json()
    with pytest.raises(ValueError, match=said):
        RoleHolds.from_json({"decode": {**document["decode"], **change}})


@pytest.mark.parametrize(
    ("hold", "inside", "outside"),
    [
        (Hold(3, 3), {3: 3}, {2: 3, 9: 3}),
        (Hold(2), {2: 2, 9: 9}, {0: 2}),
        (Hold(at_most=2), {0: 0, 2: 2}, {3: 2}),
        (Hold(2, 4), {2: 2, 4: 4}, {1: 2, 5: 4}),
    ],
    ids=str,
)
def test_a_hold_moves_numbers_outside_to_its_nearest_bound(
    hold: Hold, inside: dict[int, int], outside: dict[int, int]
) -> None:
    for workers, bounded in {**inside, **outside}.items():
        assert hold.bounded(workers) == bounded
        assert hold.allows(workers) is (workers in inside)


def test_only_the_held_role_is_bounded() -> None:
    assert RoleHolds(decode=Hold(3, 3)).bounded(Targets(5, 1)) == Targets(5, 3)
    assert RoleHolds(prefill=Hold(at_most=2)).bounded(Targets(5, 1)) == Targets(2, 1)


def test_a_hold_of_prefill_does_not_apply_where_there_are_none() -> None:
    holds = RoleHolds(Hold(2), Hold(3))
    assert holds.beside(Targets(1, 1)) == holds
    assert holds.beside(Targets(0, 1)) == RoleHolds(decode=Hold(3))


def test_a_hold_is_over_at_its_deadline_by_the_wall_clock_and_never_without_one() -> None:
    holds = RoleHolds(Hold(2), AT_3)
    for now_s in (0.0, NOON_S, NOON_S + 7199):
        assert holds.lasting(now_s) == holds
    assert holds.lasting(NOON_S + 7200) == RoleHolds(prefill=Hold(2))
    assert AT_3.left_s(NOON_S) == 7200
    assert Hold(2).left_s(NOON_S) is None


@pytest.mark.parametrize(
    ("hold", "words"),
    [
        (AT_3, "held at 3 by alice until 2026-11-22 14:00 UTC"),
        (Hold(2, by="bob"), "held at 2 or more by bob until `dynaplan release`"),
        (Hold(at_most=4), "held at 4 or fewer until `dynaplan release`"),
        (Hold(1, until_s=60.0), "held at 1 or more until 60 s after 1970-01-01 UTC"),
        (Hold(1, 4), "held between 1 and 4 until `dynaplan release`"),
    ],
    ids=lambda each: "" if isinstance(each, Hold) else each,
)
def test_a_hold_says_its_bounds_its_maker_and_its_end(hold: Hold, words: str) -> None:
    assert str(hold) == words


def test_a_role_is_held_anew_or_released_without_the_other() -> None:
    holds = RoleHolds(Hold(1), Hold(2))
    assert holds.replaced(Role.DECODE, None) == RoleHolds(prefill=Hold(1))
    assert holds.replaced(Role.PREFILL, AT_3) == RoleHolds(AT_3, Hold(2))
    assert list(holds.by_role) == [Role.PREFILL, Role.DECODE]
    assert json.loads(RoleHolds().to_text()) == {}


def test_a_hold_with_hours_is_in_force_while_they_are_open() -> None:
    both = RoleHolds(AT_3, NIGHT)
    assert both.in_force(NOON_S, wall_clock) == RoleHolds(AT_3)
    assert both.in_force(NOON_S + 11 * 3600, wall_clock) == RoleHolds(decode=NIGHT)
    assert str(NIGHT) == "held at 1 by alice at 22:00-06:00 (UTC)"


def test_in_a_zone_that_nobody_knows_the_hours_are_never_open() -> None:
    lost = RoleHolds(decode=Hold(5, 5, at="00:00-24:00", zone="Mars/Olympus"))
    assert lost.in_force(NOON_S, wall_clock) == RoleHolds()


def test_hours_end_at_the_deadline_open_or_not() -> None:
    ending = RoleHolds(decode=Hold(2, 2, until_s=NOON_S, until="noon", at="09:00-17:00", zone="UTC"))
    assert ending.lasting(NOON_S - 1) == ending
    assert ending.lasting(NOON_S) == RoleHolds()
    assert list(ending.sentences) == ["decode was held at 2 at 09:00-17:00 (UTC) until noon"]
