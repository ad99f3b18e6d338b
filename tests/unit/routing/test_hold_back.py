"""Requests are held back in front of full workers only while a place is to be expected in time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.contract.running_limits import RunningLimit
from dynaplan.routing.hold_back import free_places, must_wait

LIMIT = RunningLimit(4, wait_s=1.0, ends_per_s=2.0)
numbers = st.lists(st.integers(0, 12), max_size=6)


def test_where_there_is_a_place_nobody_waits() -> None:
    assert not must_wait(LIMIT, [3], waiting=0)
    assert not must_wait(LIMIT, [4, 2], waiting=1)


def test_a_place_belongs_to_those_that_wait_already() -> None:
    assert must_wait(LIMIT, [3], waiting=1)


def test_as_many_wait_as_the_workers_end_in_time() -> None:
    assert must_wait(LIMIT, [4], waiting=1)
    assert not must_wait(LIMIT, [4], waiting=2)
    assert must_wait(LIMIT, [4, 4], waiting=3)


def test_what_runs_beyond_the_limit_has_to_end_first() -> None:
    assert must_wait(LIMIT, [5], waiting=0)
    assert not must_wait(LIMIT, [6], waiting=0)


def test_without_room_the_limit_holds_nobody_back() -> None:
    assert not must_wait(RunningLimit(4, wait_s=0.0, ends_per_s=9.0), [4, 4, 4], waiting=0)
    assert not must_wait(LIMIT, [], waiting=0)


@given(st.integers(1, 8), st.floats(0, 9), st.floats(0, 9), numbers, st.integers(0, 9))
def test_who_waits_has_a_place_in_time_at_the_expected_pace(
    most: int, wait_s: float, ends_per_s: float, running: list[int], waiting: int
) -> None:
    limit = RunningLimit(most, wait_s, ends_per_s)
    if must_wait(limit, running, waiting):
        ends = int(wait_s * ends_per_s * len(running))
        beyond = sum(max(0, each - most) for each in running)
        assert free_places(limit, running) + ends - beyond > waiting


@given(numbers, st.integers(0, 9))
def test_whoever_comes_later_waits_no_sooner_than_those_before(running: list[int], waiting: int) -> None:
    if free_places(LIMIT, running) <= waiting and not must_wait(LIMIT, running, waiting):
        assert not must_wait(LIMIT, running, waiting + 1)
