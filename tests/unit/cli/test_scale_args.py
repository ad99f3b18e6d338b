"""``dynaplan scale``: from arguments to counts and holds."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from dynaplan.cli import scale_args
from dynaplan.cli.scale_args import (
    CountArgument,
    HoldArgument,
    check_budget,
    check_decode_left,
    check_gpus,
    check_leaving,
    check_options,
    describe_hold,
    describe_hours,
    new_hold,
    parse_count,
    parse_hold,
    resolve_counts,
)
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import CapacityError, ConfigError

ROLES = {"decode": Role.DECODE, "VllmWorker": Role.DECODE, "prefill": Role.PREFILL}
NOW = DesiredCounts(1, 2, 4, 4)
BY_ALICE = Hold(by="alice")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("decode=3", CountArgument(Role.DECODE, 3)),
        ("VllmWorker=0", CountArgument(Role.DECODE, 0)),
        ("prefill=+2", CountArgument(Role.PREFILL, more=2)),
        ("decode=-1", CountArgument(Role.DECODE, more=-1)),
        ("decode", CountArgument(Role.DECODE)),
    ],
)
def test_an_argument_names_a_number_a_difference_or_only_a_role(text: str, asked: CountArgument) -> None:
    assert parse_count(text, ROLES) == asked


@pytest.mark.parametrize(
    "text", ["decode=", "decode=two", "decode=²", "decode=--1", "decode=1.5", "decode=99999"]
)
def test_what_is_no_number_of_workers_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"decode=2, or decode=\+1"):
        parse_count(text, ROLES)


def test_an_unknown_role_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="Known: VllmWorker, decode, prefill"):
        parse_count("router=2", ROLES)


def test_a_role_alone_needs_bounds_and_no_role_is_named_twice() -> None:
    with pytest.raises(ConfigError, match="how many workers"):
        check_options([CountArgument(Role.DECODE)], None)
    with pytest.raises(ConfigError, match="how many workers"):
        check_options([CountArgument(Role.DECODE)], HoldArgument(BY_ALICE))
    check_options([CountArgument(Role.DECODE)], HoldArgument(BY_ALICE, at_least=2))
    with pytest.raises(ConfigError, match="named twice"):
        check_options([CountArgument(Role.DECODE, 2), CountArgument(Role.DECODE, 3)], None)


@pytest.mark.parametrize(
    ("asked", "hold", "count", "held"),
    [
        (CountArgument(Role.DECODE, 3), None, 3, None),
        (CountArgument(Role.DECODE, more=1), None, 3, None),
        (CountArgument(Role.DECODE, 3), HoldArgument(BY_ALICE), 3, Hold(3, 3, by="alice")),
        (CountArgument(Role.DECODE, more=-2), HoldArgument(BY_ALICE), 0, Hold(0, 0, by="alice")),
        (CountArgument(Role.DECODE), HoldArgument(BY_ALICE, at_least=4), 4, Hold(4, None, by="alice")),
        (CountArgument(Role.DECODE), HoldArgument(BY_ALICE, at_least=1), 2, Hold(1, None, by="alice")),
        (CountArgument(Role.DECODE), HoldArgument(BY_ALICE, at_most=1), 1, Hold(0, 1, by="alice")),
        (CountArgument(Role.DECODE, 3), HoldArgument(BY_ALICE, 2, 4), 3, Hold(2, 4, by="alice")),
    ],
    ids=str,
)
def test_the_number_is_asked_for_at_once_and_held(
    asked: CountArgument, hold: HoldArgument | None, count: int, held: Hold | None
) -> None:
    assert resolve_counts([asked], hold, NOW, RoleHolds()) == ({Role.DECODE: count}, RoleHolds(decode=held))


def test_a_number_outside_its_own_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode=5 is outside of 3 or fewer"):
        resolve_counts([CountArgument(Role.DECODE, 5)], HoldArgument(BY_ALICE, at_most=3), NOW, RoleHolds())


def test_a_number_outside_of_somebodys_hold_is_refused_with_two_ways_out() -> None:
    with pytest.raises(ConfigError, match="held at 3 by alice") as refused:
        resolve_counts([CountArgument(Role.DECODE, 2)], None, NOW, RoleHolds(decode=Hold(3, 3, by="alice")))
    assert "dynaplan release decode" in str(refused.value)
    assert "--hold" in str(refused.value)


def test_while_a_command_holds_a_role_no_number_goes_with_it_not_even_the_one_it_holds() -> None:
    restart = RoleHolds(decode=Hold(3, 3, holder=ProcessIdentity(7, 1, "boot")))
    with pytest.raises(ConfigError, match="while a command replaces workers, so 3 is not possible"):
        resolve_counts([CountArgument(Role.DECODE, 3)], None, NOW, restart)
    _, holds = resolve_counts([CountArgument(Role.DECODE, 3)], HoldArgument(BY_ALICE), NOW, restart)
    assert holds.decode == replace(BY_ALICE, at_least=3, at_most=3)


def test_within_the_bounds_a_number_is_free_and_another_hold_takes_the_place_of_the_first() -> None:
    bounds = RoleHolds(decode=Hold(2, 4, by="alice"))
    assert resolve_counts([CountArgument(Role.DECODE, 3)], None, NOW, bounds) == ({Role.DECODE: 3}, bounds)
    counts, holds = resolve_counts([CountArgument(Role.DECODE, 1)], HoldArgument(Hold(by="bob")), NOW, bounds)
    assert (counts, holds) == ({Role.DECODE: 1}, RoleHolds(decode=Hold(1, 1, by="bob")))


def test_a_difference_needs_a_number_to_begin_with_and_never_goes_below_0() -> None:
    with pytest.raises(ConfigError, match="there are 2"):
        resolve_counts([CountArgument(Role.DECODE, more=-3)], None, NOW, RoleHolds())
    with pytest.raises(ConfigError, match="not decided yet"):
        resolve_counts([CountArgument(Role.PREFILL, more=1)], None, DesiredCounts(), RoleHolds())


def test_nobody_is_left_without_an_answer_by_chance() -> None:
    check_decode_left({Role.DECODE: 1, Role.PREFILL: 0}, RoleHolds())
    for counts, holds in (({Role.DECODE: 0}, RoleHolds()), ({}, RoleHolds(decode=Hold(at_most=0)))):
        with pytest.raises(ConfigError, match="--yes"):
            check_decode_left(counts, holds)


FLEET = FleetCounts(WorkerCounts(ready=1, gpus=1), WorkerCounts(ready=2, gpus=2), 8)


def test_more_gpus_than_the_box_has_are_refused() -> None:
    check_gpus(FLEET, {Role.DECODE: 3})
    with pytest.raises(CapacityError, match="needs 9 GPUs, and there are 8"):
        check_gpus(FLEET, {Role.DECODE: 4})
    with pytest.raises(CapacityError, match="there are 8\n  GPU 2: 71 of 80 GiB in use: left out\n  Ask"):
        check_gpus(FLEET, {Role.DECODE: 4}, ["GPU 2: 71 of 80 GiB in use"])


def test_where_only_cores_compute_workers_are_counted_and_not_gpus() -> None:
    check_gpus(FLEET, {Role.DECODE: 3}, has_gpus=False)
    with pytest.raises(
        CapacityError, match=r"room for 9 workers, and this deployment has it for 8\n.*--gpus 9"
    ):
        check_gpus(FLEET, {Role.DECODE: 4}, has_gpus=False)


def test_a_hold_above_the_planners_gpu_budget_is_refused_with_the_option() -> None:
    settings = PlannerSettings(max_gpu_budget=5)
    check_budget(settings, FLEET, RoleHolds(decode=Hold(2)))
    check_budget(settings, FLEET, RoleHolds(decode=Hold(at_most=9)))
    with pytest.raises(ConfigError, match=r"--Planner\.max-gpu-budget=7"):
        check_budget(settings, FLEET, RoleHolds(decode=Hold(3, 3)))
    aggregated = FleetCounts(decode=WorkerCounts(ready=2, gpus=2))
    with pytest.raises(ConfigError, match="takes 6 GPUs"):
        check_budget(settings, aggregated, RoleHolds(decode=Hold(3, 3)))


def test_the_worker_that_is_to_leave_is_one_of_the_role_that_is_scaled() -> None:
    workers = [Worker("ns_VllmWorker", "VllmWorker", Role.DECODE), Worker("ns_P", "P", Role.PREFILL)]
    asked = [CountArgument(Role.DECODE, 1)]
    check_leaving("ns_VllmWorker", asked, workers)
    with pytest.raises(ConfigError, match=r"(?s)--leaving ns_P: no decode worker.*ns_VllmWorker"):
        check_leaving("ns_P", asked, workers)
    with pytest.raises(ConfigError, match="There is none"):
        check_leaving("ns_P", asked, [])


@pytest.fixture(autouse=True)
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_args.time, "time", lambda: 1795348800.0)


def test_without_options_nothing_is_held() -> None:
    assert parse_hold(False, None, None, None) is None


def test_a_hold_tells_its_maker_and_its_deadline() -> None:
    asked = parse_hold(False, "2h", None, None)
    assert asked
    made = asked.made
    assert (made.since_s, made.until_s, made.uid, made.pid) == (
        1795348800.0,
        1795356000.0,
        os.getuid(),
        os.getpid(),
    )
    assert made.by
    assert made.host
    assert made.until.startswith("2026-11-2")
    assert Hold.from_json({**made.__dict__}) == made
    assert new_hold(None).until_s is None


@pytest.mark.parametrize(
    "options", [(True, None, None, None), (True, "2h", None, None), (False, None, 0, None)]
)
def test_each_option_holds(options: Any) -> None:
    assert parse_hold(*options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((True, None, 2, None), "--at-least and --at-most bound it"),
        ((False, None, 3, 2), "no number is both"),
        ((False, None, 99999, None), "The most is 10000"),
        ((False, "2", None, None), "For example 90s, 10m, 2h or 1d"),
        ((False, "0s", None, None), "up to a year"),
        ((False, "367d", None, None), "up to a year"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_answered(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_hold(*options)


def test_a_user_without_a_name_is_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_args.os, "getuid", lambda: 4_000_000)
    assert new_hold(None).by == "uid 4000000"


def test_a_hold_is_described_with_its_maker_its_end_and_the_way_out() -> None:
    hold = Hold(3, 3, 0.0, 1795356000.0, "2026-11-22 14:00:00 +0000", "alice", 1000, 4711, "box")
    assert describe_hold(Role.DECODE, hold, 1795348800.0) == (
        "decode is held at 3 by alice (uid 1000, pid 4711 on box) until 2026-11-22 14:00:00 +0000 "
        "(2:00:00 left), or until `dynaplan release decode`"
    )
    assert describe_hold(Role.PREFILL, Hold(2), 0.0) == (
        "prefill is held at 2 or more until `dynaplan release prefill`"
    )
    assert "which is over" in describe_hold(Role.DECODE, hold, 1795356000.0)


NOON_S = 1795435200.0  # Monday 2026-11-23, 12:00 UTC
OFFICE = Hold(3, 3, by="alice", at="09:00-17:00", zone="UTC")


def test_the_hours_are_those_of_the_local_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    hold = parse_hold(False, None, None, None, "9:00-17:00")
    assert hold
    assert (hold.made.at, hold.made.zone) == ("09:00-17:00", "UTC")


def test_hours_and_zones_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--at 'nine': 'nine': expected hours of every day"):
        parse_hold(False, None, None, None, "nine")
    monkeypatch.setenv("TZ", "Mars/Olympus")
    with pytest.raises(ConfigError, match="'Mars/Olympus' is not known here"):
        parse_hold(False, None, None, None, "09:00-17:00")


MADE = Hold(at="09:00-17:00", zone="UTC")


@pytest.mark.parametrize(
    ("asked", "hold", "held"),
    [
        (CountArgument(Role.DECODE, 3), HoldArgument(MADE), Hold(3, 3, at="09:00-17:00", zone="UTC")),
        (
            CountArgument(Role.DECODE),
            HoldArgument(MADE, at_least=2),
            Hold(2, None, at="09:00-17:00", zone="UTC"),
        ),
    ],
)
def test_a_number_or_bounds_are_held_and_nothing_is_asked_for_now(
    asked: CountArgument, hold: HoldArgument, held: Hold
) -> None:
    assert resolve_counts([asked], hold, DesiredCounts(), RoleHolds()) == ({}, RoleHolds(decode=held))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (CountArgument(Role.DECODE, more=1), "means nothing at other hours"),
        (CountArgument(Role.DECODE, 3), "outside of 4 or more"),
    ],
)
def test_more_than_now_and_a_number_out_of_its_bounds_are_refused(asked: CountArgument, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_counts([asked], HoldArgument(MADE, at_least=4), DesiredCounts(), RoleHolds())


def test_outside_of_its_hours_a_hold_refuses_no_number() -> None:
    five, all_day = [CountArgument(Role.DECODE, 5)], Hold(3, 3, at="00:00-24:00", zone="UTC")
    with pytest.raises(ConfigError, match="decode is held at 3 at 00:00-24:00"):
        resolve_counts(five, None, DesiredCounts(), RoleHolds(decode=all_day))
    never = RoleHolds(decode=replace(all_day, zone="Mars/Olympus"))
    assert resolve_counts(five, None, DesiredCounts(), never) == ({Role.DECODE: 5}, never)


def test_a_hold_says_its_hours_and_when_they_change() -> None:
    said = describe_hold(Role.DECODE, OFFICE, NOON_S)
    assert said.startswith("decode is held at 3 by alice (uid 0")
    assert said.endswith("at 09:00-17:00 (UTC): open now, until Mon 2026-11-23 17:00 +0000")
    assert describe_hours(OFFICE, NOON_S + 86400 / 2) == "next from Tue 2026-11-24 09:00 +0000"
    assert describe_hours(Hold(at="00:00-24:00", zone="UTC"), NOON_S) == "always open"
    assert describe_hours(Hold(at="00:00-24:00", zone="Mars"), NOON_S).startswith(
        "never: the time zone 'Mars'"
    )
