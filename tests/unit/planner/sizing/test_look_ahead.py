"""How far ahead is looked, and what counts as coming."""

from __future__ import annotations

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths
from dynaplan.planner.model import Demand, Sizing, WorkerLimits
from dynaplan.planner.sizing.limits import fit_budget
from dynaplan.planner.sizing.look_ahead import lookahead, size_for_all

LIMITS = WorkerLimits(max_gpus=16)


def demand(requests_per_s: float) -> Demand:
    return Demand(requests_per_s, Lengths.fixed(100), Lengths.fixed(100))


def one_worker_for_ten(each: Demand, limits: WorkerLimits) -> Sizing:
    """A size that is easy to follow: a decode worker for ten requests/s, a prefill worker for twenty."""
    rate = each.requests_per_s
    return Sizing(PoolSizes(max(1, -int(-rate // 20)), max(1, -int(-rate // 10))))


def planned(rates: list[float], current: PoolSizes) -> Sizing:
    return size_for_all(one_worker_for_ten, [demand(each) for each in rates], current, LIMITS)


def test_demand_must_be_foretold_until_the_next_decision_s_workers_serve() -> None:
    ahead = lookahead(startup_s=60.0, interval_s=30.0)
    assert (ahead.from_s, ahead.until_s, ahead.intervals) == (60.0, 90.0, 3)
    assert lookahead(0.0, 30.0).intervals == 1
    assert lookahead(61.0, 30.0).intervals == 4


def test_more_workers_come_as_soon_as_one_demand_needs_them() -> None:
    assert planned([10.0, 31.0], PoolSizes(1, 1)).workers == PoolSizes(2, 4)


def test_the_budget_holds_for_demands_that_need_different_workers() -> None:
    def odd(each: Demand, limits: WorkerLimits) -> Sizing:
        wanted = PoolSizes(14, 2) if each.requests_per_s < 10 else PoolSizes(2, 14)
        return Sizing(fit_budget(wanted, limits) or PoolSizes(1, 1))

    sizing = size_for_all(odd, [demand(5.0), demand(50.0)], PoolSizes(1, 1), LIMITS)
    assert LIMITS.gpus(sizing.workers) <= 16


def test_no_demand_known_changes_nothing() -> None:
    assert planned([], PoolSizes(2, 2)).workers == PoolSizes(2, 2)
