"""Holds, hours of the day and reservations: their forms, bounds and ends."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.holds import (
    MAX_HELD_WORKERS,
    MAX_HOLD_S,
    Hold,
    ReservedGpus,
    RoleHolds,
    parse_hours,
    reserved_words,
)
from dynaplan.graph.lifecycle import Role
from dynaplan.process.identity import ProcessIdentity
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
    assert RoleHolds(decode=Hold(3, 3)).bounded(PoolSizes(5, 1)) == PoolSizes(5, 3)
    assert RoleHolds(prefill=Hold(at_most=2)).bounded(PoolSizes(5, 1)) == PoolSizes(2, 1)


def test_a_hold_of_prefill_does_not_apply_where_there_are_none() -> None:
    holds = RoleHolds(Hold(2), Hold(3))
    assert holds.beside(PoolSizes(1, 1)) == holds
    assert holds.beside(PoolSizes(0, 1)) == RoleHolds(decode=Hold(3))


def test_a_hold_is_over_at_its_deadline_by_the_wall_clock_and_never_without_one() -> None:
    holds = RoleHolds(Hold(2), AT_3)
    for now_s in (0.0, NOON_S, NOON_S + 7199):
        assert holds.without_expired(now_s) == holds
    assert holds.without_expired(NOON_S + 7200) == RoleHolds(prefill=Hold(2))
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
    assert ending.without_expired(NOON_S - 1) == ending
    assert ending.without_expired(NOON_S) == RoleHolds()
    assert list(ending.descriptions) == ["decode was held at 2 at 09:00-17:00 (UTC) until noon"]


BERLIN = wall_clock("Europe/Berlin")
"""Set forward on 2026-03-29 from 02:00 to 03:00, back on 2026-10-25 from 03:00 to 02:00."""


def at(text: str) -> float:
    """A moment of Berlin's clock; ``*`` is the second of two equal hours."""
    local = datetime.fromisoformat(text.rstrip("*")).replace(
        tzinfo=ZoneInfo("Europe/Berlin"), fold=text.endswith("*")
    )
    return local.timestamp()


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("9:00-17:00", "09:00-17:00"),
        (" 00:00-24:00 ", "00:00-24:00"),
        ("22:00-06:00", "22:00-06:00"),
    ],
)
def test_hours_are_written_in_one_form_that_reads_back_to_the_same(text: str, same: str) -> None:
    assert str(parse_hours(text)) == same
    assert parse_hours(same) == parse_hours(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nine to five", "expected hours of every day"),
        ("09:00-17:00 mon-fri", "expected hours of every day"),
        ("09:00-12:00; 13:00-17:00", "expected hours of every day"),
        ("09:60-17:00", "no time of a day"),
        ("09:00-25:00", "no time of a day"),
        ("09:00-09:00", "begins and ends at once"),
        ("24:00-06:00", "begins at 00:00 of the next day"),
    ],
)
def test_what_are_no_hours_is_refused_with_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_hours(text)


def test_they_are_open_from_the_first_minute_until_before_the_last() -> None:
    office = parse_hours("09:00-17:00")
    times = ("08:59", "09:00", "16:59", "17:00")
    is_open = [office.is_open_at(at(f"2026-11-23T{time}"), BERLIN) for time in times]
    assert is_open == [False, True, True, False]


def test_hours_past_midnight_go_on_in_the_morning() -> None:
    night = parse_hours("22:00-06:00")
    times = ("21:59", "22:00", "05:59", "06:00")
    is_open = [night.is_open_at(at(f"2026-11-27T{time}"), BERLIN) for time in times]
    assert is_open == [False, True, True, False]


def test_they_say_when_they_open_and_close() -> None:
    office = parse_hours("09:07-17:00")
    opens_s = office.next_change_s(at("2026-11-21T18:00"), BERLIN)
    assert opens_s == at("2026-11-22T09:07")
    assert office.next_change_s(opens_s, BERLIN) == at("2026-11-22T17:00")


def test_hours_that_are_always_open_never_change() -> None:
    assert parse_hours("00:00-24:00").next_change_s(0.0, BERLIN) is None


def test_when_the_clock_is_set_forward_what_is_skipped_does_not_happen() -> None:
    skipped, across = parse_hours("02:15-02:45"), parse_hours("01:30-02:30")
    eve = at("2026-03-28T12:00")
    assert skipped.next_change_s(eve, BERLIN) == at("2026-03-30T02:15")
    assert across.next_change_s(eve, BERLIN) == at("2026-03-29T01:30")
    assert across.next_change_s(at("2026-03-29T01:45"), BERLIN) == at("2026-03-29T03:00")
    night = parse_hours("01:00-05:00")
    assert at("2026-03-29T05:00") - at("2026-03-29T01:00") == 3 * 3600
    assert night.next_change_s(at("2026-03-29T01:00"), BERLIN) == at("2026-03-29T05:00")


def test_when_the_clock_is_set_back_an_hour_that_comes_twice_is_open_twice() -> None:
    twice = parse_hours("02:15-02:45")
    moments, now_s = [], at("2026-10-24T12:00")
    for _ in range(4):
        change_s = twice.next_change_s(now_s, BERLIN)
        assert change_s
        moments.append(change_s)
        now_s = change_s
    assert moments == [
        at("2026-10-25T02:15"),
        at("2026-10-25T02:45"),
        at("2026-10-25T02:15*"),
        at("2026-10-25T02:45*"),
    ]


MIDDAY_S = 1795435200.0
FOR_NOW = Hold(since_s=MIDDAY_S, until_s=MIDDAY_S + 3600, until="one o'clock", by="alice", uid=1000)
NIGHTS = Hold(at="22:00-06:00", zone="UTC")


def test_reservations_read_back_as_they_were_written() -> None:
    both = ReservedGpus({7: FOR_NOW, 0: NIGHTS})
    assert ReservedGpus.from_text(both.to_text()) == both
    assert list(both.to_json()) == ["0", "7"]
    assert ReservedGpus.from_text("") == ReservedGpus()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"seven": {}}', "expected the index of a GPU"),
        ('{"-1": {}}', "expected the index of a GPU"),
        ('{"7": 7}', "expected a JSON object"),
        ('{"7": {"by": 7}}', "'by' is 7"),
    ],
)
def test_what_is_no_reservation_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ReservedGpus.from_text(text)


def test_a_gpu_is_reserved_until_the_deadline_or_while_its_hours_are_open() -> None:
    both = ReservedGpus({7: FOR_NOW, 0: NIGHTS})
    assert both.in_force(MIDDAY_S, wall_clock) == {7: FOR_NOW}
    assert both.in_force(MIDDAY_S + 11 * 3600, wall_clock) == {0: NIGHTS}
    assert both.without_expired(MIDDAY_S + 3600) == ReservedGpus({0: NIGHTS})


def test_gpus_are_reserved_and_given_back_one_by_one() -> None:
    both = ReservedGpus({0: NIGHTS}).with_gpus({7: FOR_NOW})
    assert both.without(frozenset({0, 3})) == ReservedGpus({7: FOR_NOW})


def test_they_say_their_maker_and_their_end() -> None:
    assert reserved_words(FOR_NOW) == "reserved by alice until one o'clock"
    assert reserved_words(NIGHTS) == "reserved at 22:00-06:00 (UTC)"
    assert list(ReservedGpus({7: FOR_NOW}).descriptions) == ["GPU 7 was reserved by alice until one o'clock"]


def test_a_loan_lasts_as_long_as_its_holder_and_says_what_runs_until_when() -> None:
    holder = ProcessIdentity(4711, 99, "boot")
    loan = Hold(by="alice", command="python train.py", holder=holder, until_s=100.0, until="22:00")
    reserved = ReservedGpus({0: loan, 1: Hold(by="bob")})
    assert ReservedGpus.from_text(reserved.to_text()) == reserved
    assert "holder" not in reserved.to_text().partition('"1"')[2]
    assert reserved.without_expired(200.0) == reserved
    assert reserved.without_ended(lambda _: True) == reserved
    assert reserved.without_ended(lambda _: False) == ReservedGpus({1: Hold(by="bob")})
    assert reserved_words(loan) == (
        "lent to alice for `python train.py` (pid 4711) until it ends; it is asked to at 22:00"
    )
    with pytest.raises(ValueError, match="started_at"):
        ReservedGpus.from_text('{"0": {"holder": {"pid": 1}}}')
