"""Experts on the number of workers, and what they would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.core.sizing.fluid import Work
from dynaplan.core.sizing.measured_load import measured_demand
from dynaplan.core.sizing.queueing.queueing_model import ServiceModel, SteadyState
from dynaplan.core.sizing.trials.experts import Arrived, ExpertPanel, priced, tried, wants
from dynaplan.domain.planning.sizing import ExpertTrial, Hedge, SlaTargets, WorkerLimits
from dynaplan.domain.planning.targets import Targets
from tests.unit.core.planning.targets import model, traffic

SERVICE = model().service
AGGREGATED = replace(SERVICE, prefill=None)
BOX = WorkerLimits()
PANEL = ExpertPanel(BOX, is_aggregated=False)
ALONE = Targets(1, 1)
DOUBT = 720.0
PROMISE = SlaTargets(500.0, 20.0)


def work_of(service: ServiceModel = SERVICE) -> Work:
    demand = measured_demand(traffic(10.0))
    assert demand
    return Work(SteadyState(service, demand), PROMISE)


def came(arrivals: Sequence[float], startup_s: float = 60.0, service: ServiceModel = SERVICE) -> Arrived:
    """An interval with these arrivals, one number each second."""
    return Arrived(float(len(arrivals)), startup_s, sum(arrivals), arrivals, work_of(service))


def after(
    intervals: Sequence[Arrived],
    wishes: Sequence[Targets] = (ALONE,),
    panel: ExpertPanel = PANEL,
    hedge: Hedge | None = None,
) -> Hedge:
    """The hedge after these intervals; of the wishes the last one stays."""
    found = replace(hedge or Hedge(), followed=(wishes[0],))
    for number, each in enumerate(intervals):
        found = replace(found, followed=tuple(wishes[: number + 1]))
        found = tried(found, panel, each, PROMISE, 1.0, DOUBT)
    return found


def cost(hedge: Hedge, workers: Targets, *, follows: bool = False) -> float:
    return next(t.cost_gpu_s for t in hedge.trials if (t.workers, t.follows) == (workers, follows))


def test_the_experts_are_all_splits_of_the_box_standing_still_and_following() -> None:
    assert len(PANEL.experts) == 2 * 28
    assert PANEL.experts[0] == (ALONE, True)
    assert sum(PANEL.odds) == pytest.approx(1)
    assert PANEL.odds[0] == pytest.approx(1 - 1 / 56)
    apart = ExpertPanel(WorkerLimits(max_gpus=8, decode_gpus=2, least=Targets(2, 1)), is_aggregated=False)
    assert (Targets(2, 3), False) in apart.experts
    assert all(2 <= workers.prefill <= 8 - 2 * workers.decode for workers, _ in apart.experts)


def test_of_a_large_box_numbers_are_tried_at_most_a_quarter_apart() -> None:
    large = ExpertPanel(WorkerLimits(max_gpus=500), is_aggregated=True)
    numbers = [workers.decode for workers, follows in large.experts if follows]
    assert numbers[:12] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    assert numbers[-1] == 64
    assert all(workers.prefill == 0 for workers, _ in large.experts)


def test_an_expert_that_follows_wants_at_least_its_own_workers() -> None:
    assert wants(ExpertTrial(Targets(2, 1), follows=True), Targets(1, 3)) == Targets(2, 3)
    assert wants(ExpertTrial(Targets(2, 1), follows=False), Targets(1, 3)) == Targets(2, 1)


def test_gpus_are_paid_for_while_they_are_held_and_so_are_starting_ones() -> None:
    calm = after([came([1.0] * 30)] * 2, wishes=[ALONE, Targets(3, 1)])

    assert cost(calm, Targets(2, 2)) == pytest.approx(4 * 60)
    assert cost(calm, ALONE) == pytest.approx(2 * 60)
    assert cost(calm, ALONE, follows=True) == pytest.approx(2 * 30 + 4 * 30)
    assert cost(calm, Targets(2, 2), follows=True) == pytest.approx(4 * 30 + 5 * 30)


def test_a_worker_serves_once_it_was_wanted_for_the_start_up_time() -> None:
    thirty = came([1.0] * 30, startup_s=45.0)
    assert thirty.serving([1, 4]) == [1] * 30
    assert thirty.serving([1, 4, 4]) == [1] * 15 + [4] * 15
    assert thirty.serving([4, 4, 2]) == [2] * 30
    assert came([1.0] * 30, startup_s=0.0).serving([1, 4]) == [4] * 30


def test_help_that_comes_when_the_burst_is_over_costs_more_than_standing_still() -> None:
    calm, burst = came([1.0] * 30), came([60.0] * 30)
    wishes = [ALONE, ALONE, Targets(4, 2), Targets(4, 2), ALONE] * 4
    hedge = after([calm, burst, calm, calm, calm] * 4, wishes)

    assert cost(hedge, Targets(4, 2)) < cost(hedge, ALONE, follows=True)
    trust = dict(zip(PANEL.experts, PANEL.trust(hedge), strict=True))
    assert trust[Targets(4, 2), False] > 10 * trust[ALONE, True]


def test_a_late_request_costs_what_pays_for_a_worker_that_is_needed_for_a_twentieth_of_the_time() -> None:
    assert priced(ExpertTrial(), 100.0, 1.0, 0.0, PROMISE) == pytest.approx(19)
    assert priced(ExpertTrial(), 100.0, 1.0, 2.0, PROMISE) == pytest.approx(57)
    each = work_of().request_gpu_s(BOX)
    assert each > 1 / work_of().prompts_per_s
    assert work_of(AGGREGATED).request_gpu_s(BOX) == pytest.approx(each, rel=0.5)


def test_an_expert_that_breaks_the_promise_pays_as_many_times_as_it_breaks_it() -> None:
    for late, times in ((0.0, 1), (5.0, 1), (10.0, 2), (100.0, 20)):
        price = priced(ExpertTrial(late=late), 100.0, 1.0, 0.0, PROMISE)
        assert price == pytest.approx(19 * times)
    assert priced(ExpertTrial(), 0.0, 1.0, 0.0, PROMISE) == pytest.approx(19)


def test_an_interval_without_requests_empties_the_queues_and_costs_its_gpus() -> None:
    busy = after([came([60.0] * 30)])
    silent = tried(busy, PANEL, Arrived(30.0, 60.0), PROMISE, 0.5, DOUBT)

    assert busy.trials[0].queue > 100
    assert {(each.queue, each.in_time, each.decoding) for each in silent.trials} == {(0.0, 0.0, 0.0)}
    assert cost(silent, ALONE) == pytest.approx(0.5 * cost(busy, ALONE) + 60)
    assert (silent.seconds, silent.requests) == (45.0, 900.0)


def test_a_request_over_both_targets_is_late_once() -> None:
    hedge = after([came([200.0] * 60)])
    assert all(each.late <= hedge.requests + 1e-6 for each in hedge.trials)


def test_an_expert_that_is_tried_for_the_first_time_begins_as_following_alone() -> None:
    small = after([came([60.0] * 30)], panel=ExpertPanel(WorkerLimits(max_gpus=4), is_aggregated=False))
    trials = {(each.workers, each.follows): each for each in PANEL.trials(small)}

    assert trials[Targets(6, 2), False].cost_gpu_s == trials[ALONE, True].cost_gpu_s > 0
    assert trials[Targets(3, 1), False].cost_gpu_s == cost(small, Targets(3, 1))


def test_aggregated_workers_are_tried_too_in_the_order_of_arrival() -> None:
    panel = ExpertPanel(replace(BOX, least=Targets(0, 1)), is_aggregated=True)
    hedge = after([came([40.0] * 30, service=AGGREGATED)] * 4, [Targets(0, 1)], panel)
    costs = [cost(hedge, Targets(0, number)) for number in range(1, 9)]

    assert 2 <= costs.index(min(costs)) <= 7
    assert panel.experts[0] == (Targets(0, 1), True)
