"""Which split a backtest finds, and how many it simulates for that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.planner.backtesting import search
from dynaplan.planner.backtesting.backtest import simulated_service
from dynaplan.planner.backtesting.search import Search, Trial, find_cheapest
from dynaplan.planner.model import WorkerLimits
from tests.unit.planner.backtesting.windows import given_window
from tests.unit.planner.rules.targets import SETTINGS, model

LIMITS = WorkerLimits(8, least=PoolSizes(1, 1))


ONE_EACH = PoolSizes(1, 1)


def window(
    requests_per_s: float = 1.0,
    seconds: int = 60,
    limits: WorkerLimits = LIMITS,
    present: PoolSizes = ONE_EACH,
) -> Search:
    requests = [TracedRequest(n / requests_per_s, 3000, 150) for n in range(round(requests_per_s * seconds))]
    service = simulated_service(model().service_for(ONE_EACH), SETTINGS, limits)
    return Search(service, given_window(requests), 0.05, present, limits)


def found(
    monkeypatch: pytest.MonkeyPatch,
    in_time: Callable[[PoolSizes], float],
    begin: PoolSizes,
    present: PoolSizes = ONE_EACH,
    limits: WorkerLimits = LIMITS,
) -> tuple[PoolSizes, int]:
    """The answer, and the number of splits simulated, where so many would have been in time with each."""

    def run(search: Search, workers: PoolSizes, *, is_whole: bool = False) -> Trial:
        part = in_time(workers)
        is_kept = part >= 0.95
        progress = 1.0 if is_kept or is_whole else part
        return Trial(workers, limits.gpus(workers), part, is_kept, progress)

    monkeypatch.setattr(search, "run", run)
    best, trials = find_cheapest(window(limits=limits, present=present), begin)
    return best.workers, len(trials)


def needs(prefill: int, decode: int) -> Callable[[PoolSizes], float]:
    def in_time(workers: PoolSizes) -> float:
        return min(1.0, workers.prefill / prefill) * min(1.0, workers.decode / decode)

    return in_time


@pytest.mark.parametrize("begin", [PoolSizes(3, 2), PoolSizes(4, 3), PoolSizes(2, 2), PoolSizes(1, 1)])
def test_the_cheapest_split_that_keeps_the_promise_is_found_from_anywhere(
    monkeypatch: pytest.MonkeyPatch, begin: PoolSizes
) -> None:
    assert found(monkeypatch, needs(3, 2), begin)[0] == PoolSizes(3, 2)


def test_an_answer_that_still_holds_takes_three_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, needs(3, 2), PoolSizes(3, 2)) == (PoolSizes(3, 2), 3)


def test_who_is_there_is_tried_before_workers_are_added_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, runs = found(monkeypatch, needs(5, 2), PoolSizes(1, 1), PoolSizes(5, 3))
    assert workers == PoolSizes(5, 2)
    assert runs <= 5


def test_where_all_gpus_are_too_few_the_role_that_lacks_them_gets_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers, _ = found(monkeypatch, needs(12, 2), PoolSizes(4, 4))
    assert workers == PoolSizes(6, 2)


def test_minimums_and_maximums_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = WorkerLimits(8, least=PoolSizes(2, 2), most=PoolSizes(3, 9))
    assert found(monkeypatch, needs(1, 1), PoolSizes(1, 1), limits=limits)[0] == PoolSizes(2, 2)
    assert found(monkeypatch, needs(8, 2), PoolSizes(1, 1), limits=limits)[0].prefill == 3


def test_a_run_ends_early_where_too_many_have_missed() -> None:
    overloaded = window(60.0)
    trial = search.run(overloaded, PoolSizes(1, 1))
    assert not trial.is_kept
    assert trial.progress < 0.9
    assert search.run(overloaded, PoolSizes(1, 1), is_whole=True).progress == 1.0


def test_a_load_that_one_worker_of_each_bears_needs_no_more() -> None:
    best, _ = find_cheapest(window(5.0), PoolSizes(2, 2))
    assert best.workers == PoolSizes(1, 1)
    assert best.in_time == 1.0


def test_a_removal_needs_more_requests_in_time_than_a_split_that_is_there() -> None:
    """One of 20 has missed, as promised; that fewer workers would miss no more is not known by that."""
    few = window(1.0, 20)
    longer_than_any_context = TracedRequest(19.0, 3000, 1_000_000)
    requests = [request for each in few.window for request in each.requests]
    lost = given_window([*requests[:-1], longer_than_any_context])
    there = Search(few.service, lost, 0.05, ONE_EACH, LIMITS)
    fewer = Search(few.service, lost, 0.05, PoolSizes(2, 1), LIMITS)
    assert search.run(there, ONE_EACH).in_time == pytest.approx(0.95)
    assert search.run(there, ONE_EACH).is_kept
    assert not search.run(fewer, ONE_EACH).is_kept


@pytest.mark.parametrize(("lost", "is_kept"), [(range(0, 600, 50), True), (range(300, 312), False)])
def test_misses_that_come_together_keep_a_worker_where_as_many_single_ones_do_not(
    lost: range, is_kept: bool
) -> None:
    whole = window(2.0, 300, present=PoolSizes(2, 1))
    requests = [request for each in whole.window for request in each.requests]
    for number in lost:
        requests[number] = TracedRequest(requests[number].arrival_s, 3000, 1_000_000)
    asked = Search(whole.service, given_window(requests), 0.05, PoolSizes(2, 1), LIMITS)
    trial = search.run(asked, ONE_EACH)
    assert trial.in_time == pytest.approx(0.98)
    assert trial.is_kept is is_kept


def test_no_requests_keep_every_promise() -> None:
    assert find_cheapest(window(1.0, 0), PoolSizes(3, 3))[0].workers == PoolSizes(1, 1)
