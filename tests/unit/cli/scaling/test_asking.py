"""``dynaplan scale``: from arguments to counts and holds."""

from __future__ import annotations

import pytest

from dynaplan.cli.scaling.asking import (
    AskedCount,
    AskedHold,
    check_answered,
    check_budget,
    check_gpus,
    check_leaving,
    check_options,
    parse_count,
    settled,
)
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import FleetCounts, WorkerCounts
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.util.errors import CapacityError, ConfigError

ROLES = {"decode": Role.DECODE, "VllmWorker": Role.DECODE, "prefill": Role.PREFILL}
NOW = DesiredCounts(1, 2, 4, 4)
BY_ALICE = Hold(by="alice")


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("decode=3", AskedCount(Role.DECODE, 3)),
        ("VllmWorker=0", AskedCount(Role.DECODE, 0)),
        ("prefill=+2", AskedCount(Role.PREFILL, more=2)),
        ("decode=-1", AskedCount(Role.DECODE, more=-1)),
        ("decode", AskedCount(Role.DECODE)),
    ],
)
def test_an_argument_names_a_number_a_difference_or_only_a_role(text: str, asked: AskedCount) -> None:
    assert parse_count(text, ROLES) == asked


@pytest.mark.parametrize(
    "text", ["decode=", "decode=two", "decode=²", "decode=--1", "decode=1.5", "decode=99999"]
)
def test_what_is_no_number_of_workers_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"decode=2, or decode=\+1"):
        parse_count(text, ROLES)


def test_an_unknown_role_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="Known: decode, VllmWorker, prefill"):
        parse_count("router=2", ROLES)


def test_a_role_alone_needs_bounds_and_no_role_is_named_twice() -> None:
    with pytest.raises(ConfigError, match="how many workers"):
        check_options([AskedCount(Role.DECODE)], None)
    with pytest.raises(ConfigError, match="how many workers"):
        check_options([AskedCount(Role.DECODE)], AskedHold(BY_ALICE))
    check_options([AskedCount(Role.DECODE)], AskedHold(BY_ALICE, at_least=2))
    with pytest.raises(ConfigError, match="named twice"):
        check_options([AskedCount(Role.DECODE, 2), AskedCount(Role.DECODE, 3)], None)


@pytest.mark.parametrize(
    ("asked", "hold", "count", "held"),
    [
        (AskedCount(Role.DECODE, 3), None, 3, None),
        (AskedCount(Role.DECODE, more=1), None, 3, None),
        (AskedCount(Role.DECODE, 3), AskedHold(BY_ALICE), 3, Hold(3, 3, by="alice")),
        (AskedCount(Role.DECODE, more=-2), AskedHold(BY_ALICE), 0, Hold(0, 0, by="alice")),
        (AskedCount(Role.DECODE), AskedHold(BY_ALICE, at_least=4), 4, Hold(4, None, by="alice")),
        (AskedCount(Role.DECODE), AskedHold(BY_ALICE, at_least=1), 2, Hold(1, None, by="alice")),
        (AskedCount(Role.DECODE), AskedHold(BY_ALICE, at_most=1), 1, Hold(0, 1, by="alice")),
        (AskedCount(Role.DECODE, 3), AskedHold(BY_ALICE, 2, 4), 3, Hold(2, 4, by="alice")),
    ],
    ids=str,
)
def test_the_number_is_asked_for_at_once_and_held(
    asked: AskedCount, hold: AskedHold | None, count: int, held: Hold | None
) -> None:
    assert settled([asked], hold, NOW, RoleHolds()) == ({Role.DECODE: count}, RoleHolds(decode=held))


def test_a_number_outside_its_own_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="decode=5 is outside of 3 or fewer"):
        settled([AskedCount(Role.DECODE, 5)], AskedHold(BY_ALICE, at_most=3), NOW, RoleHolds())


def test_a_number_outside_of_somebodys_hold_is_refused_with_two_ways_out() -> None:
    with pytest.raises(ConfigError, match="held at 3 by alice") as refused:
        settled([AskedCount(Role.DECODE, 2)], None, NOW, RoleHolds(decode=Hold(3, 3, by="alice")))
    assert "dynaplan release decode" in str(refused.value)
    assert "--hold" in str(refused.value)


def test_within_the_bounds_a_number_is_free_and_another_hold_takes_the_place_of_the_first() -> None:
    bounds = RoleHolds(decode=Hold(2, 4, by="alice"))
    assert settled([AskedCount(Role.DECODE, 3)], None, NOW, bounds) == ({Role.DECODE: 3}, bounds)
    counts, holds = settled([AskedCount(Role.DECODE, 1)], AskedHold(Hold(by="bob")), NOW, bounds)
    assert (counts, holds) == ({Role.DECODE: 1}, RoleHolds(decode=Hold(1, 1, by="bob")))


def test_a_difference_needs_a_number_to_begin_with_and_never_goes_below_0() -> None:
    with pytest.raises(ConfigError, match="there are 2"):
        settled([AskedCount(Role.DECODE, more=-3)], None, NOW, RoleHolds())
    with pytest.raises(ConfigError, match="not decided yet"):
        settled([AskedCount(Role.PREFILL, more=1)], None, DesiredCounts(), RoleHolds())


def test_nobody_is_left_without_an_answer_by_chance() -> None:
    check_answered({Role.DECODE: 1, Role.PREFILL: 0}, RoleHolds())
    for counts, holds in (({Role.DECODE: 0}, RoleHolds()), ({}, RoleHolds(decode=Hold(at_most=0)))):
        with pytest.raises(ConfigError, match="--yes"):
            check_answered(counts, holds)


FLEET = FleetCounts(WorkerCounts(ready=1, gpus=1), WorkerCounts(ready=2, gpus=2), 8)


def test_more_gpus_than_the_box_has_are_refused() -> None:
    check_gpus(FLEET, {Role.DECODE: 3})
    with pytest.raises(CapacityError, match="needs 9 GPUs, and there are 8"):
        check_gpus(FLEET, {Role.DECODE: 4})
    with pytest.raises(CapacityError, match="there are 8\n  GPU 2: 71 of 80 GB in use: left out\n  Ask"):
        check_gpus(FLEET, {Role.DECODE: 4}, ["GPU 2: 71 of 80 GB in use"])


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
    asked = [AskedCount(Role.DECODE, 1)]
    check_leaving("ns_VllmWorker", asked, workers)
    with pytest.raises(ConfigError, match=r"(?s)--leaving ns_P: no decode worker.*ns_VllmWorker"):
        check_leaving("ns_P", asked, workers)
    with pytest.raises(ConfigError, match="There is none"):
        check_leaving("ns_P", asked, [])
