"""Schedules: gaps are filled, starts are paid for, and workers are asked for in time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.schedule import filled, gpu_seconds, schedule
from tests.unit.lab.simulate.oracle.windows import timing
from tests.unit.simulation.services import workers

LEVELS = st.lists(st.integers(1, 5), min_size=1, max_size=40)


def test_a_gap_as_long_as_a_start_is_filled_and_a_longer_one_is_not() -> None:
    assert filled([2, 2, 2, 1, 1, 2], timing(6)) == [2, 2, 2, 2, 2, 2]
    assert filled([2, 2, 2, 1, 1, 1, 2], timing(7)) == [2, 2, 2, 1, 1, 1, 2]


def test_nothing_can_be_started_before_the_trace_begins() -> None:
    assert filled([1, 1, 3, 1, 1], timing(5)) == [3, 3, 3, 1, 1]


def test_a_start_costs_its_time() -> None:
    assert gpu_seconds([1, 1, 1, 2], timing(4, gpus=2)) == 2 * (3 * 5 + 2 * 5 + 10)


def test_a_schedule_wants_a_worker_a_start_early_and_lets_it_go_on_time() -> None:
    levels = {Role.DECODE: [1, 1, 1, 1, 2, 1]}
    entries = schedule(levels, {Role.DECODE: timing(6)})
    assert entries == [(0.0, workers(0, 1)), (10.0, workers(0, 2)), (25.0, workers(0, 1))]


@given(LEVELS, st.sampled_from([0.0, 3.0, 5.0, 12.0, 60.0]))
def test_filling_takes_nobody_away_and_once_is_enough(levels: list[int], startup_s: float) -> None:
    full = filled(levels, timing(len(levels), startup_s))
    assert all(after >= before for after, before in zip(full, levels, strict=True))
    assert filled(full, timing(len(levels), startup_s)) == full


@given(LEVELS, st.sampled_from([0.0, 3.0, 5.0, 12.0]))
def test_what_a_schedule_wants_holds_as_long_as_its_workers_serve_and_start(
    levels: list[int], startup_s: float
) -> None:
    one = timing(len(levels), startup_s)
    full = filled(levels, one)
    entries = schedule({Role.DECODE: full}, {Role.DECODE: one})
    held_s, ends = 0.0, [at_s for at_s, _ in entries[1:]] + [one.end_s]
    for (at_s, wanted), end_s in zip(entries, ends, strict=True):
        held_s += wanted.decode * (end_s - at_s)
    assert held_s == pytest.approx(gpu_seconds(full, one))


def test_wanted_numbers_are_those_of_both_roles() -> None:
    levels = {Role.PREFILL: [1, 2], Role.DECODE: [3, 1]}
    entries = schedule(levels, {role: timing(2, startup_s=0.0) for role in levels})
    assert entries == [(0.0, Targets(1, 3)), (5.0, Targets(2, 1))]
