"""Where a backtest cannot be relied upon no worker is removed, and the queueing model adds: one case each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dynaplan.contract.counts import PoolSizes, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.planner.assembly import restore_evidence
from dynaplan.planner.backtesting.schedule import BacktestSchedule
from dynaplan.planner.model import BacktestResult, Observation, PlannerState, WorkerLimits
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.timing import BACKTEST_DEADLINE_S
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval

PRESENT, ENOUGH = PoolSizes(3, 2), PoolSizes(1, 1)
QUIET_PER_S, BUSY_PER_S = 0.5, 60.0
T = SETTINGS.adjustment_interval_s


def seen(number: int, requests_per_s: float) -> Observation:
    return planned_interval(PRESENT.prefill, PRESENT.decode, [requests_per_s], at_s=number * T)


def after(
    intervals: int, requests_per_s: float, failing: Mapping[int, WorkerCounts] | None = None
) -> BacktestSchedule:
    """The evidence of so many intervals; ``failing`` are the decode workers at the end of some of them."""
    schedule = BacktestSchedule(SETTINGS)
    for number in range(intervals):
        now = seen(number, requests_per_s)
        decode = (failing or {}).get(number, now.fleet.decode)
        schedule.add(replace(now, fleet=replace(now.fleet, decode=decode)))
    return schedule


def answered(
    present_per_s: float, failing: Mapping[int, WorkerCounts] | None = None
) -> tuple[BacktestSchedule, Observation]:
    """Ten minutes of this load, and an answer in this interval: one worker of each would do."""
    schedule, now = after(60, present_per_s, failing), seen(60, present_per_s)
    question = schedule.question(now, PlannerState(), WorkerLimits(8), PRESENT)
    assert question
    schedule.note(question, BacktestResult(ENOUGH), now.at_s, 1.0)
    return schedule, now


def with_answer(schedule: BacktestSchedule, now: Observation) -> Observation:
    return replace(now, backtest=schedule.answer(now))


def no_requests(present_per_s: float) -> Observation:
    return with_answer(after(60, 0.0), seen(60, present_per_s))


def too_few_requests(present_per_s: float) -> Observation:
    return with_answer(after(60, 0.08), seen(60, present_per_s))


def first_start(present_per_s: float) -> Observation:
    return with_answer(BacktestSchedule(SETTINGS), seen(0, present_per_s))


def restart_without_evidence(present_per_s: float) -> Observation:
    schedule = restore_evidence([{"of": "another program"}], SETTINGS, datetime.now(UTC))
    return with_answer(schedule, seen(0, present_per_s))


def workers_that_failed(present_per_s: float) -> Observation:
    failing = with_answer(*answered(present_per_s))
    counts = WorkerCounts(ready=PRESENT.decode - 1, failed=1, gpus=1)
    return replace(failing, fleet=replace(failing.fleet, decode=counts))


def a_worker_that_failed_and_serves_again(present_per_s: float) -> Observation:
    return with_answer(*answered(present_per_s, {30: WorkerCounts(ready=1, backoff=1, gpus=1)}))


def a_worker_that_started_again_unasked(present_per_s: float) -> Observation:
    return with_answer(*answered(present_per_s, {30: WorkerCounts(ready=1, starting=1, gpus=1)}))


def held(present_per_s: float) -> Observation:
    least = RoleHolds(Hold(PRESENT.prefill, None), Hold(PRESENT.decode, None))
    return replace(with_answer(*answered(present_per_s)), holds=least)


def outgrown(present_per_s: float) -> Observation:
    schedule, _ = answered(QUIET_PER_S / 5)
    for number in (61, 62):
        schedule.add(seen(number, present_per_s))
    return with_answer(schedule, seen(62, present_per_s))


def killed(present_per_s: float) -> Observation:
    schedule, _ = answered(QUIET_PER_S)
    now = seen(61, present_per_s)
    schedule.add(now)
    schedule.answer(now)  # the interval in which it was new
    schedule.fail("the backtest was killed", now.at_s)
    return with_answer(schedule, now)


def always_late(present_per_s: float) -> Observation:
    """Every backtest of three hours ends at its deadline; there are few, and none has an answer."""
    schedule, questions = after(60, present_per_s), 0
    for number in range(60, 60 + round(3 * 3600 / T)):
        now = seen(number, present_per_s)
        schedule.add(now)
        if schedule.question(now, PlannerState(), WorkerLimits(8), PRESENT):
            questions += 1
            schedule.fail("the backtest was late", now.at_s, took_s=BACKTEST_DEADLINE_S)
    assert questions == 5  # a tenth of a core
    return with_answer(schedule, now)


CASES: dict[str, Callable[[float], Observation]] = {
    each.__name__.replace("_", " "): each
    for each in (
        no_requests,
        too_few_requests,
        first_start,
        restart_without_evidence,
        workers_that_failed,
        a_worker_that_failed_and_serves_again,
        a_worker_that_started_again_unasked,
        held,
        outgrown,
        killed,
        always_late,
    )
}


def decided(observation: Observation) -> PoolSizes:
    return decide(SETTINGS, PlannerState(), observation, model())[1].desired


def test_an_answer_that_can_be_relied_upon_removes() -> None:
    assert decided(with_answer(*answered(QUIET_PER_S))) == ENOUGH


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_nothing_is_removed(case: Callable[[float], Observation]) -> None:
    assert decided(case(QUIET_PER_S)) == PRESENT


NOT_MISSING = (
    held,
    workers_that_failed,
    a_worker_that_failed_and_serves_again,
    a_worker_that_started_again_unasked,
)
"""The cases in which an answer bounds the number from below, or a hold does."""


@pytest.mark.parametrize("case", [each for each in CASES.values() if each not in NOT_MISSING])
def test_the_queueing_model_adds(case: Callable[[float], Observation]) -> None:
    assert decided(case(BUSY_PER_S)).prefill > PRESENT.prefill


def test_where_no_further_gpu_is_available_nothing_is_added_and_nothing_removed() -> None:
    for case in (first_start, outgrown):
        now = case(BUSY_PER_S)
        fleet = replace(now.fleet, gpus_total=PRESENT.prefill + PRESENT.decode)
        wanted = decided(replace(now, fleet=fleet))
        assert wanted.prefill + wanted.decode == fleet.gpus_total


def test_a_worker_that_starts_because_a_decision_asked_for_it_is_no_failure() -> None:
    starting = WorkerCounts(ready=1, starting=1, gpus=1)
    schedule = BacktestSchedule(SETTINGS)
    for number in range(61):
        now = seen(number, QUIET_PER_S)
        pending = replace(now.desired, decision_id=now.desired.scaled_decision_id + 1)
        schedule.add(replace(now, desired=pending, fleet=replace(now.fleet, decode=starting)))
    assert not schedule.answer(now).missing.startswith("workers failed")


def test_a_failure_that_the_window_has_forgotten_stops_no_removal() -> None:
    window = round(SETTINGS.slo_window_s / T)
    schedule = after(window + 31, QUIET_PER_S, {30: WorkerCounts(ready=1, backoff=1, gpus=1)})
    now = seen(window + 31, QUIET_PER_S)
    question = schedule.question(now, PlannerState(), WorkerLimits(8), PRESENT)
    assert question
    schedule.note(question, BacktestResult(ENOUGH), now.at_s, 1.0)
    assert decided(with_answer(schedule, now)) == ENOUGH
