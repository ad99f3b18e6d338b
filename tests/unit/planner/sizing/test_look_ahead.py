"""How far ahead is looked, what counts as coming, and who may leave."""

from __future__ import annotations

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Lengths
from dynaplan.planner.model import Demand, Sizing, WorkerLimits
from dynaplan.planner.sizing.limits import fit_budget
from dynaplan.planner.sizing.look_ahead import Sizer, lookahead, size_for_all

LIMITS = WorkerLimits(max_gpus=16)


def demand(requests_per_s: float) -> Demand:
    return Demand(requests_per_s, Lengths.fixed(100), Lengths.fixed(100))


def one_worker_for_ten(each: Demand, limits: WorkerLimits) -> Sizing:
    """A size that is easy to follow: a decode worker for ten requests/s, a prefill worker for twenty."""
    rate = each.requests_per_s
    return Sizing(Targets(max(1, -int(-rate // 20)), max(1, -int(-rate // 10))))


def one_worker_for_eight(each: Demand, limits: WorkerLimits) -> Sizing:
    """The same for who stays, when the promise lets them miss less."""
    return one_worker_for_ten(each.scaled(10 / 8), limits)


def planned(
    rates: list[float],
    current: Targets,
    headroom: float = 0.15,
    survive: Sizer = one_worker_for_ten,
    now: float | None = None,
) -> Sizing:
    demands, came = [demand(each) for each in rates], None if now is None else demand(now)
    return size_for_all(one_worker_for_ten, survive, demands, current, LIMITS, headroom, came)


def test_demand_must_be_foretold_until_the_next_decision_s_workers_serve() -> None:
    ahead = lookahead(startup_s=60.0, interval_s=30.0)
    assert (ahead.from_s, ahead.until_s, ahead.intervals) == (60.0, 90.0, 3)
    assert lookahead(0.0, 30.0).intervals == 1
    assert lookahead(61.0, 30.0).intervals == 4


def test_more_workers_come_as_soon_as_one_demand_needs_them() -> None:
    assert planned([10.0, 31.0], Targets(1, 1)).targets == Targets(2, 4)


def test_a_worker_stays_while_the_others_could_not_carry_a_little_more() -> None:
    assert planned([19.0], Targets(1, 3)).targets == Targets(1, 3)
    sizing = planned([19.0], Targets(1, 3))
    assert any("3 decode workers stay, not 2" in step.why for step in sizing.steps)


def test_workers_leave_that_nobody_would_miss() -> None:
    assert planned([17.0], Targets(1, 3)).targets == Targets(1, 2)
    assert planned([17.0], Targets(4, 8)).targets == Targets(1, 2)


def test_who_stays_is_counted_by_what_they_may_miss_and_who_is_added_by_what_these_may() -> None:
    assert planned([17.0], Targets(1, 3), 0.0, one_worker_for_eight).targets == Targets(1, 3)
    assert planned([17.0], Targets(1, 2), 0.0, one_worker_for_eight).targets == Targets(1, 2)
    assert planned([17.0], Targets(1, 1), 0.0, one_worker_for_eight).targets == Targets(1, 2)


def test_how_those_who_stay_would_do_adds_nobody() -> None:
    """While prefill workers leave, the decode workers are asked too: what they lack is not made up for."""
    leaving = planned([17.0], Targets(4, 2), 0.0, one_worker_for_eight)
    assert leaving.targets == Targets(2, 2)


def test_a_forecast_is_no_reason_to_let_go_who_is_needed_now() -> None:
    assert planned([5.0], Targets(2, 4), now=31.0).targets == Targets(2, 4)
    assert planned([5.0], Targets(2, 4), now=25.0).targets == Targets(2, 3)
    assert planned([5.0], Targets(2, 4), now=0.0).targets == planned([5.0], Targets(2, 4)).targets


def test_who_is_needed_now_only_is_not_added() -> None:
    assert planned([5.0], Targets(1, 1), now=31.0).targets == Targets(1, 1)


def test_where_nobody_leaves_the_story_says_nothing_of_who_stays() -> None:
    stages = [step.stage for step in planned([30.0], Targets(1, 1)).steps]
    assert "survivors" not in stages
    assert "survivors" in [step.stage for step in planned([5.0], Targets(1, 3)).steps]


def test_demand_that_will_rise_again_before_a_new_worker_could_serve_keeps_the_old_one() -> None:
    assert planned([5.0, 25.0], Targets(2, 3)).targets == Targets(2, 3)


def test_noise_about_a_constant_demand_settles() -> None:
    workers, seen = Targets(1, 1), []
    for step in range(60):
        workers = planned([30.0 * (1 + 0.05 * (-1) ** step)], workers).targets
        seen.append(workers)
    assert len(set(seen[2:])) == 1


def test_the_budget_holds_for_demands_that_need_different_workers() -> None:
    def odd(each: Demand, limits: WorkerLimits) -> Sizing:
        wanted = Targets(14, 2) if each.requests_per_s < 10 else Targets(2, 14)
        return Sizing(fit_budget(wanted, limits) or Targets(1, 1))

    sizing = size_for_all(odd, odd, [demand(5.0), demand(50.0)], Targets(1, 1), LIMITS, 0.15)
    assert LIMITS.gpus(sizing.targets) <= 16


def test_no_demand_known_changes_nothing() -> None:
    assert planned([], Targets(2, 2)).targets == Targets(2, 2)
