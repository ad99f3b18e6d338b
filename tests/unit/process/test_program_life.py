"""The life of ``serve`` under its supervisor, by its numbered cases."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest

from dynaplan.process.program_life import (
    AWAY,
    FIRST,
    FIRST_PAUSE_S,
    HERE,
    LONGEST_PAUSE_S,
    MOVES,
    OVER,
    STEADY_S,
    TRIAL,
    TRIAL_S,
    IllegalMove,
    ProgramLife,
)

COMMAND, OTHER = ["serve"], ["another", "serve"]
GRACE_S = 40.0


def life_in(state: str) -> ProgramLife:
    """A life that began at 0 s and is in that state at 10 s."""
    life = ProgramLife(COMMAND, GRACE_S, 0.0)
    if state in (HERE, AWAY, OVER):
        life.arrived(1.0)
    if state == AWAY:
        life.ended(10.0, is_meant=False)
    if state == OVER:
        life.ended(10.0, is_meant=True)
    if state == TRIAL:
        life.ended(10.0, is_meant=False, successor=OTHER)
    assert life.state == state
    return life


@pytest.mark.parametrize("state", [FIRST, HERE, AWAY, TRIAL])
def test_a_program_that_arrives_is_here_whatever_was_before(state: str) -> None:
    life = life_in(state)
    life.arrived(11.0)
    assert life.state == HERE
    assert not life.is_awaited


@pytest.mark.parametrize("state", [FIRST, HERE])
def test_an_end_that_was_meant_is_the_end(state: str) -> None:
    life = life_in(state)
    life.ended(11.0, is_meant=True)
    assert life.state == OVER


def test_an_exit_in_the_midst_of_a_new_start_is_not_meant() -> None:
    life = life_in(AWAY)
    life.ended(11.0, is_meant=True)
    assert life.state == AWAY


def test_one_that_was_here_for_long_is_started_again_at_once_and_others_after_a_doubling_pause() -> None:
    life = ProgramLife(COMMAND, GRACE_S, 0.0)
    life.arrived(1.0)
    life.ended(1.0 + STEADY_S, is_meant=False)
    assert life.start_at_s == 1.0 + STEADY_S
    pauses = []
    for _ in range(7):
        life.ended(5.0, is_meant=False)
        pauses.append(life.start_at_s - 5.0)
    assert pauses == [FIRST_PAUSE_S, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]


def test_one_that_was_here_for_a_moment_waits_for_the_first_pause() -> None:
    life = life_in(HERE)
    life.ended(1.0 + STEADY_S / 2, is_meant=False)
    assert life.start_at_s == 1.0 + STEADY_S / 2 + FIRST_PAUSE_S


def test_a_crash_loop_does_not_renew_the_grace() -> None:
    life = life_in(AWAY)
    for now_s in (12.0, 20.0, 35.0):
        life.ended(now_s, is_meant=False)
    assert not life.is_grace_over(10.0 + GRACE_S - 0.1)
    assert life.is_grace_over(10.0 + GRACE_S)
    life.finish()
    assert life.state == OVER


def test_a_successor_is_on_trial_and_the_command_of_before_comes_back_where_it_fails() -> None:
    life = life_in(TRIAL)
    assert life.command == OTHER
    assert life.trial_ends_s == 10.0 + min(TRIAL_S, GRACE_S / 2)
    life.ended(12.0, is_meant=True)
    assert (life.state, life.command, life.start_at_s) == (AWAY, COMMAND, 12.0)
    assert life.away_since_s == 10.0


def test_a_successor_that_arrives_is_the_program_from_then_on() -> None:
    life = life_in(TRIAL)
    life.arrived(11.0)
    life.ended(30.0, is_meant=False)
    assert (life.state, life.command) == (AWAY, OTHER)


def test_a_successor_that_cannot_be_started_gives_way_at_once() -> None:
    life = life_in(TRIAL)
    life.start_failed(11.0)
    assert (life.command, life.start_at_s) == (COMMAND, 11.0)
    life.start_failed(12.0)
    assert (life.state, life.start_at_s) == (AWAY, 12.0 + LONGEST_PAUSE_S)


@pytest.mark.parametrize(
    ("state", "is_running", "due_s"),
    [
        (AWAY, True, 10.0 + GRACE_S),
        (AWAY, False, 10.0),
        (TRIAL, True, 10.0 + GRACE_S / 2),
        (TRIAL, False, 10.0),
    ],
)
def test_what_is_due_is_the_start_while_none_runs_else_the_end_of_the_trial_or_grace(
    state: str, is_running: bool, due_s: float
) -> None:
    assert life_in(state).due_at_s(is_running=is_running) == due_s


def test_the_first_program_was_never_away_and_a_later_one_since_the_last_was_here() -> None:
    assert life_in(FIRST).away_s(7.0) == 0.0
    assert life_in(AWAY).away_s(12.0) == 2.0


def test_nothing_follows_the_end() -> None:
    with pytest.raises(IllegalMove, match="arrived while over"):
        life_in(OVER).arrived(11.0)


def test_every_state_has_its_row_on_the_page() -> None:
    import dynaplan.process.program_life as module

    page = module.__doc__ or ""
    assert all(f"| {state.upper()} |" in page for state in MOVES)


def seconds_until_still(life: ProgramLife, beats: Callable[[float], int], step_s: float = 1.0) -> float:
    """Look every ``step_s`` for two minutes; the time at which it stands still, or infinity."""
    now_s = 1.0
    while now_s < 121.0:
        if life.is_still(now_s, partial(beats, now_s)):
            return now_s - 1.0
        now_s += step_s
    return math.inf


def test_a_program_without_a_heartbeat_for_its_time_stands_still() -> None:
    life = life_in(FIRST)
    life.arrived(1.0, still_s=60.0)
    assert seconds_until_still(life, lambda now_s: 7) == 60.0
    life.arrived(1.0, still_s=60.0)
    assert seconds_until_still(life, lambda now_s: int(now_s)) == math.inf


def test_a_supervisor_that_stood_still_itself_accuses_nobody() -> None:
    life = life_in(FIRST)
    life.arrived(1.0, still_s=60.0)
    assert seconds_until_still(life, lambda now_s: 7, step_s=100.0) == math.inf


@pytest.mark.parametrize(("still_s", "beat"), [(60.0, 0), (0.0, 7)])
def test_a_program_without_a_heartbeat_that_can_be_read_is_not_judged(still_s: float, beat: int) -> None:
    life = life_in(FIRST)
    life.arrived(1.0, still_s)
    assert seconds_until_still(life, lambda now_s: beat) == math.inf


@pytest.mark.parametrize("state", [FIRST, AWAY, TRIAL])
def test_one_that_is_not_here_yet_is_judged_by_the_grace_alone(state: str) -> None:
    assert seconds_until_still(life_in(state), lambda now_s: 7) == math.inf
