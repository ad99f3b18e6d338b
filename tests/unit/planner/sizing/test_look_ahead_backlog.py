"""Who waits when workers that are asked for now serve, on top of what comes then."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.contract.counts import FleetCounts, WorkerCounts
from dynaplan.contract.traffic import Lengths
from dynaplan.planner.model import AverageLoad, Demand, Observation
from dynaplan.planner.sizing.look_ahead import backlog_demand
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import H200, kind

DISAGGREGATED = QueueingModel(kind(H200), kind(H200))
INTERVAL_S = 10.0


def demand(requests_per_s: float) -> Demand:
    return Demand(requests_per_s, Lengths.fixed(3000), Lengths.fixed(150))


PER_WORKER = 10.0 / SteadyState(DISAGGREGATED, demand(10.0)).prefill_waiting(1).utilisation
"""Prompts/s that one prefill worker computes when there is always one."""
HELD = kind(H200).concurrent_prefills
"""Prompts that a worker takes from the queue at once."""


def seen(queue: float | None, workers: WorkerCounts, startup_s: float = 0.0) -> Observation:
    return Observation(
        0.0,
        FleetCounts(prefill=workers, decode=WorkerCounts(ready=1)),
        load=AverageLoad(prefill_queue_last=queue, prefill_workers=workers.ready),
        startup_s=startup_s,
    )


def rate_with(
    queue: float | None,
    workers: WorkerCounts,
    startup_s: float = 0.0,
    rates: tuple[float, ...] = (PER_WORKER / 2,),
) -> float | None:
    foretold = [demand(each) for each in rates]
    whole = backlog_demand(DISAGGREGATED, foretold, seen(queue, workers, startup_s), INTERVAL_S)
    return whole.requests_per_s if whole else None


def test_nobody_waits_where_nothing_is_queued_and_the_workers_do() -> None:
    assert rate_with(0.0, WorkerCounts(ready=1)) is None
    assert rate_with(None, WorkerCounts(ready=1)) is None


def test_who_is_queued_is_to_be_served_by_when_workers_of_the_next_decision_would_serve() -> None:
    rate = rate_with(HELD + 50.0, WorkerCounts(ready=1))
    assert rate == pytest.approx(PER_WORKER / 2 + 50.0 / INTERVAL_S)


def test_what_the_workers_hold_already_does_not_wait() -> None:
    assert rate_with(3.0 * HELD, WorkerCounts(ready=3)) is None
    assert rate_with(3.0 * HELD + 5, WorkerCounts(ready=3)) == pytest.approx(PER_WORKER / 2 + 0.5)


def test_until_new_workers_serve_the_queue_grows_by_what_is_more_than_those_there_compute() -> None:
    rate = rate_with(0.0, WorkerCounts(ready=1), 30.0, (1.5 * PER_WORKER,))
    waiting = 0.5 * PER_WORKER * 30.0
    assert rate == pytest.approx(1.5 * PER_WORKER + waiting / 40.0)


def test_the_queue_grows_by_the_soonest_demand_and_the_largest_one_is_to_be_carried_too() -> None:
    rate = rate_with(0.0, WorkerCounts(ready=1), 30.0, (1.5 * PER_WORKER, 2 * PER_WORKER))
    assert rate == pytest.approx(2 * PER_WORKER + 0.5 * PER_WORKER * 30.0 / 40.0)


def test_a_queue_that_will_be_worked_off_before_anybody_could_help_needs_nobody() -> None:
    assert rate_with(HELD + PER_WORKER * 14.0, WorkerCounts(ready=1), 30.0) is None
    assert rate_with(HELD + PER_WORKER * 16.0, WorkerCounts(ready=1), 30.0) is not None


@pytest.mark.parametrize("state", ["starting", "backoff"])
def test_workers_that_are_starting_help_half_of_the_time(state: str) -> None:
    coming = WorkerCounts(ready=1, **{state: 2})
    rate = rate_with(0.0, coming, 30.0, (3 * PER_WORKER,))
    assert rate == pytest.approx(3 * PER_WORKER + PER_WORKER * 30.0 / 40.0)


def test_workers_that_leave_or_have_failed_help_nobody() -> None:
    gone = WorkerCounts(ready=1, draining=4, failed=4)
    assert rate_with(0.0, gone, 30.0, (1.5 * PER_WORKER,)) == rate_with(
        0.0, WorkerCounts(ready=1), 30.0, (1.5 * PER_WORKER,)
    )


def test_the_backlog_comes_on_top_of_the_largest_demand_and_grows_by_the_soonest() -> None:
    rate = rate_with(HELD + 50.0, WorkerCounts(ready=1), 0.0, (5.0, 9.0, 7.0))
    assert rate == pytest.approx(9.0 + 50.0 / INTERVAL_S)


def test_the_requests_are_as_long_and_as_bursty_as_they_were() -> None:
    foretold = replace(demand(5.0), burstiness=3.0)
    whole = backlog_demand(DISAGGREGATED, [foretold], seen(HELD + 50.0, WorkerCounts(ready=1)), INTERVAL_S)
    assert whole == replace(foretold, requests_per_s=10.0)


def test_no_workers_compute_nothing() -> None:
    assert rate_with(10.0, WorkerCounts(), 30.0, (2.0,)) == pytest.approx(2.0 + (10.0 + 60.0) / 40.0)


def test_there_is_no_queue_where_the_decode_workers_compute_the_prompts() -> None:
    aggregated = replace(DISAGGREGATED, prefill=None)
    observation = seen(500.0, WorkerCounts())
    assert backlog_demand(aggregated, [demand(5.0)], observation, INTERVAL_S) is None


def test_where_nothing_comes_soon_nothing_is_told_of_the_queue() -> None:
    assert rate_with(500.0, WorkerCounts(ready=1), 0.0, (0.0, 5.0)) is None
