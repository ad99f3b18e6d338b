"""When a backtest is made, and when there is none: each of these removes nothing."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.backtesting.backtest import backtest
from dynaplan.planner.backtesting.schedule import MAX_CPU_SHARE, BacktestSchedule, Question
from dynaplan.planner.model import (
    LOAD_ABOVE,
    LOAD_BELOW,
    LOAD_WITHIN,
    BacktestResult,
    Observation,
    OptionTrial,
    PlannerState,
    WorkerLimits,
)
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval, traffic

LIMITS, PRESENT = WorkerLimits(8), PoolSizes(2, 1)
STATE = PlannerState()
T = SETTINGS.adjustment_interval_s
EVERY_S = 300.0


def seen(number: int, requests_per_s: float | None = 5.0) -> Observation:
    observation = planned_interval(2, 1, [requests_per_s or 0.0], at_s=number * T)
    return replace(observation, traffic=traffic(requests_per_s))


def schedule_after(
    intervals: int, requests_per_s: float | None = 5.0
) -> tuple[BacktestSchedule, Observation]:
    schedule = BacktestSchedule(SETTINGS)
    for number in range(intervals):
        schedule.add(seen(number, requests_per_s))
    return schedule, seen(intervals, requests_per_s)


def asked(
    schedule: BacktestSchedule, observation: Observation, state: PlannerState = STATE
) -> Question | None:
    return schedule.question(observation, state, LIMITS, PRESENT)


def answered(intervals: int = 60, took_s: float = 1.0) -> tuple[BacktestSchedule, Observation]:
    schedule, observation = schedule_after(intervals)
    question = asked(schedule, observation)
    assert question
    schedule.note(question, BacktestResult(PoolSizes(1, 1)), observation.at_s, took_s)
    return schedule, observation


def test_a_first_start_has_no_answer_until_ten_minutes_are_known() -> None:
    schedule, observation = schedule_after(59)
    assert asked(schedule, observation) is None
    assert schedule.answer(observation) == BacktestResult(
        missing="590 s of traffic are known, and a backtest needs 600"
    )
    assert asked(*schedule_after(60)) is not None


def test_no_requests_and_too_few_have_no_answer() -> None:
    for rate, requests in ((0.0, 0), (0.08, 48)):
        schedule, observation = schedule_after(60, rate)
        assert asked(schedule, observation) is None
        assert schedule.answer(observation).missing == (
            f"{requests} requests came in 10 min, and a backtest needs 52"
        )


def test_a_full_window_without_requests_is_evidence_that_the_minimum_will_do() -> None:
    schedule, observation = schedule_after(370, 0.0)
    question = asked(schedule, observation)
    assert question
    assert backtest(model(), SETTINGS, question).workers == PoolSizes(1, 1)


def test_a_short_window_needs_no_more_than_itself_and_is_backtested_as_often() -> None:
    settings = replace(SETTINGS, slo_window_s=2 * T)
    schedule = BacktestSchedule(settings)
    for number in range(2):
        schedule.add(seen(number))
    question = asked(schedule, seen(2))
    assert question
    schedule.note(question, BacktestResult(PoolSizes(1, 1)), seen(2).at_s, 0.1)
    assert asked(schedule, seen(3))


def test_traffic_that_is_not_known_is_no_evidence() -> None:
    schedule, observation = schedule_after(60, None)
    assert schedule.answer(observation).missing.startswith("0 s of traffic are known")


def test_an_unknown_fleet_asks_for_no_backtest() -> None:
    schedule, observation = schedule_after(60)
    assert asked(schedule, replace(observation, unknown="the store is away")) is None


def test_while_a_backtest_is_computed_no_other_one_is_and_the_last_answer_holds() -> None:
    schedule, observation = schedule_after(60)
    assert asked(schedule, observation)
    assert asked(schedule, seen(1000)) is None
    assert schedule.answer(observation).missing == "the first backtest is being computed"


def test_an_answer_is_new_once() -> None:
    schedule, observation = answered()
    assert schedule.answer(observation).is_new
    later = schedule.answer(seen(61))
    assert later.workers == PoolSizes(1, 1)
    assert not later.is_new


def test_the_next_one_comes_after_five_minutes_and_later_where_one_takes_long() -> None:
    for took_s, wait_s in ((1.0, EVERY_S), (60.0, 60.0 / MAX_CPU_SHARE)):
        schedule, observation = answered(took_s=took_s)
        at_s = observation.at_s + wait_s
        assert asked(schedule, replace(observation, at_s=at_s - 1)) is None
        question = asked(schedule, replace(observation, at_s=at_s))
        assert question
        assert question.begin == PoolSizes(1, 1)


def test_one_that_fails_leaves_the_last_answer_and_says_so_until_the_next_one() -> None:
    schedule, observation = answered()
    schedule.answer(observation)
    schedule.fail("it was killed", observation.at_s)
    held = schedule.answer(seen(61))
    assert (held.workers, held.missing, held.is_new) == (PoolSizes(1, 1), "it was killed", False)
    question = asked(schedule, replace(observation, at_s=observation.at_s + EVERY_S))
    assert question
    schedule.note(question, BacktestResult(PoolSizes(2, 1)), 0.0, 1.0)
    assert schedule.answer(observation).missing == ""


def test_a_first_one_that_fails_leaves_no_answer() -> None:
    schedule, observation = schedule_after(60)
    asked(schedule, observation)
    schedule.fail("it was killed", observation.at_s)
    assert schedule.answer(observation) == BacktestResult(missing="it was killed")


def test_a_load_that_has_outgrown_the_window_is_above() -> None:
    schedule, _ = answered()
    schedule.add(seen(61, 20.0))
    assert schedule.answer(seen(61, 20.0)).change == LOAD_ABOVE


def test_nobody_leaves_for_eight_intervals_after_a_load_was_above_all_that_was_backtested() -> None:
    schedule, _ = answered()
    for number in (61, 62):
        schedule.add(seen(number, 20.0))
        schedule.answer(seen(number, 20.0))
    for later, why in ((7, "above all that had been backtested 70 s ago"), (8, "")):
        schedule.add(seen(62 + later))
        question = asked(schedule, replace(seen(62 + later), at_s=1e4))
        assert question
        schedule.note(question, BacktestResult(PoolSizes(1, 1)), 0.0, 1.0)
        assert why in schedule.answer(seen(62 + later)).missing
    assert schedule.answer(seen(62 + later)).missing == ""


def test_a_load_that_has_ended_stays_so_when_backtests_see_its_end_until_they_see_nothing_before_it() -> None:
    schedule, _ = answered()
    for number in range(60, 460):
        schedule.add(seen(number, 0.1))
        question = asked(schedule, seen(number, 0.1))
        answer = schedule.answer(seen(number, 0.1))
        if number == 62:  # two intervals are needed to know it
            assert answer.change == LOAD_BELOW
        if question:
            schedule.note(question, BacktestResult(PoolSizes(3, 3)), number * T, 1.0)
            is_over = all((each.requests < 5 * T) for each in question.intervals)
            expected = LOAD_WITHIN if is_over else LOAD_BELOW
            assert schedule.answer(seen(number, 0.1)).change == expected
    assert is_over


def test_a_load_that_comes_back_has_not_ended() -> None:
    schedule, _ = answered()
    for number, rate in enumerate((0.1, 0.1, 0.1, 5.0), 60):
        schedule.add(seen(number, rate))
        answer = schedule.answer(seen(number, rate))
    assert answer.change == LOAD_WITHIN


def test_the_answer_compares_the_split_with_cheaper_ones() -> None:
    schedule, observation = schedule_after(60)
    question = asked(schedule, observation)
    assert question
    answer = backtest(model(), SETTINGS, replace(question, begin=PoolSizes(2, 1)))
    assert answer.workers == PoolSizes(1, 1)
    assert answer.tried[0].workers == PoolSizes(1, 1)
    assert (answer.requests, answer.window_s) == (3000, 600.0)
    assert answer.missing == ""


def test_intervals_that_come_while_a_backtest_is_computed_are_not_what_it_saw() -> None:
    """The load triples meanwhile, and the window is full: its answer must not remove who was added."""
    settings = replace(SETTINGS, slo_window_s=60 * T)
    schedule = BacktestSchedule(settings)
    for number in range(60):
        schedule.add(seen(number))
    question = asked(schedule, seen(60))
    assert question
    for number in range(60, 63):
        schedule.add(seen(number, 15.0))
    schedule.note(question, BacktestResult(PoolSizes(1, 1)), seen(63).at_s, 1.0)
    answer = schedule.answer(seen(63, 15.0))
    assert answer.is_new
    assert answer.change == LOAD_ABOVE


def test_one_that_was_killed_late_waits_as_long_as_one_that_took_that_time() -> None:
    schedule, observation = schedule_after(60)
    assert asked(schedule, observation)
    schedule.fail("it was killed", observation.at_s, 60.0)
    at_s = observation.at_s + 60.0 / MAX_CPU_SHARE
    assert asked(schedule, replace(observation, at_s=at_s - 1)) is None
    assert asked(schedule, replace(observation, at_s=at_s))


def test_misses_of_other_targets_than_now_are_none_of_the_evidence() -> None:
    """After a restart with other targets the records are read again."""
    schedule = BacktestSchedule(SETTINGS)
    for number in range(60):
        observation = seen(number)
        assert observation.traffic
        over = ((SETTINGS.ttft_ms if number < 30 else 2 * SETTINGS.ttft_ms, 90.0),)
        schedule.add(replace(observation, traffic=replace(observation.traffic, over_ttft=over)))
    question = asked(schedule, seen(60))
    assert question
    assert [each.late for each in question.intervals] == [90.0] * 30 + [None] * 30


FOUND = OptionTrial("VllmWorker", "max-num-seqs", 8, 16, 0.6, 0.9, is_certain=True)


def test_options_are_tried_once_in_a_window_and_what_was_found_holds_meanwhile() -> None:
    schedule, tried, found = BacktestSchedule(SETTINGS, tries_options=True), [], []
    for number in range(480):
        observation = seen(number)
        schedule.add(observation)
        if question := asked(schedule, observation):
            tried.append(question.tries_options)
            answer = BacktestResult(PoolSizes(1, 1), best_trial=FOUND if question.tries_options else None)
            schedule.note(question, answer, observation.at_s, 0.0)
            found.append(schedule.answer(observation).best_trial)
    window = round(SETTINGS.slo_window_s / EVERY_S)
    assert [number for number, each in enumerate(tried) if each] == [0, window]
    assert found == [FOUND] * len(found)


def test_a_simulated_planner_tries_no_options() -> None:
    question = asked(*schedule_after(60))
    assert question
    assert not question.tries_options
