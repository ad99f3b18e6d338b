"""Experts on the number of workers, and what they would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.experts import ExpertPanel, chosen, followed, over, tried, wants
from dynaplan.planner.bursts.fluid import Work, long_by_chance
from dynaplan.planner.bursts.interval import Arrived
from dynaplan.planner.bursts.lived import missed_more
from dynaplan.planner.bursts.memory import ExpertTrial, Hedge, Missed
from dynaplan.planner.model import WorkerLimits
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, SteadyState, measured_demand
from tests.unit.planner.rules.targets import model, traffic

SERVICE = model().service
AGGREGATED = replace(SERVICE, prefill=None)
BOX = WorkerLimits()
PANEL = ExpertPanel(BOX, is_aggregated=False)
ALONE = Targets(1, 1)
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
    found = replace(hedge or Hedge(most=Targets(8, 8)), followed=(wishes[0],))
    for number, each in enumerate(intervals):
        found = replace(found, followed=tuple(wishes[: number + 1]))
        found = tried(found, panel, each, PROMISE, 1.0)
    return found


def trial(hedge: Hedge, workers: Targets, *, follows: bool = False) -> ExpertTrial:
    return next(each for each in hedge.trials if (each.workers, each.follows) == (workers, follows))


def held(hedge: Hedge, workers: Targets, *, follows: bool = False) -> float:
    return trial(hedge, workers, follows=follows).held_gpu_s


def trusted(hedge: Hedge, worth_gpu_s: float = 720.0) -> tuple[Targets, bool]:
    each = chosen(hedge, PANEL, PROMISE, worth_gpu_s, ALONE)
    return each.workers, each.follows


def test_the_experts_are_all_splits_of_the_box_standing_still_and_following() -> None:
    assert len(PANEL.experts) == 2 * 28
    assert PANEL.experts[0] == (ALONE, True)
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
    two, wish, known = ExpertTrial(Targets(2, 1)), Targets(1, 3), Hedge(most=Targets(4, 4))
    still = replace(two, follows=False)
    assert wants(two, wish, known) == Targets(2, 3)
    assert wants(still, wish, known) == Targets(2, 1)
    assert wants(still, wish, replace(known, leasts=(Targets(3, 1),))) == Targets(3, 1)
    assert wants(replace(still, chased_s=10.0), wish, known) == Targets(2, 3)
    assert wants(still, wish, Hedge(most=Targets(4, 2))) == Targets(2, 3)


def test_what_the_forecast_needed_is_known_once_its_time_has_come_and_for_a_window_at_least() -> None:
    found = Hedge()
    for wish in (Targets(3, 1), Targets(1, 2), ALONE, ALONE):
        found = followed(found, wish, 2, 30.0, 100.0)
    assert found.followed == (Targets(1, 2), ALONE, ALONE)
    assert found.most == Targets(3, 1)
    found = followed(found, ALONE, 2, 30.0, 100.0)
    assert found.most == Targets(3, 2)
    for _ in range(7):
        found = followed(found, ALONE, 2, 30.0, 100.0)
    assert found.most == ALONE


def test_gpus_are_paid_for_while_they_are_held_and_so_are_starting_ones() -> None:
    calm = after([came([1.0] * 30)] * 2, wishes=[ALONE, Targets(3, 1)])

    assert held(calm, Targets(2, 2)) == pytest.approx(4 * 60)
    assert held(calm, ALONE) == pytest.approx(2 * 60)
    assert held(calm, ALONE, follows=True) == pytest.approx(2 * 30 + 4 * 30)
    assert held(calm, Targets(2, 2), follows=True) == pytest.approx(4 * 30 + 5 * 30)


def test_a_worker_serves_once_it_was_wanted_for_the_start_up_time() -> None:
    thirty = came([1.0] * 30, startup_s=45.0)
    assert thirty.serving([1, 4]) == [1] * 30
    assert thirty.serving([1, 4, 4]) == [1] * 15 + [4] * 15
    assert thirty.serving([4, 4, 2]) == [2] * 30
    assert came([1.0] * 30, startup_s=0.0).serving([1, 4]) == [4] * 30


def bursts(times: int = 4) -> Hedge:
    """Bursts that are over before the help comes that the forecast asks for."""
    calm, burst = came([1.0] * 30), came([60.0] * 30)
    wishes = [ALONE, ALONE, Targets(4, 2), Targets(4, 2), ALONE] * times
    return after([calm, burst, calm, calm, calm] * times, wishes)


def test_where_help_comes_too_late_the_cheapest_that_stood_still_and_kept_the_promise_is_trusted() -> None:
    hedge = bursts()
    workers, follows = trusted(hedge)

    assert not follows
    kept = [
        each for each in hedge.trials if max(each.late.requests, each.long.requests) <= 0.05 * hedge.requests
    ]
    assert trial(hedge, workers) in kept
    assert held(hedge, workers) == min(each.held_gpu_s for each in kept)
    assert trial(hedge, ALONE, follows=True) not in kept


def test_one_burst_is_no_rule_and_several_are() -> None:
    assert trusted(bursts(1)) == (ALONE, True)
    assert trusted(bursts(4)) != (ALONE, True)


def test_misses_of_one_burst_come_together_and_of_one_that_lasts_longer_than_help_takes_they_do_not() -> None:
    burst = came([1.0] * 30, startup_s=60.0)
    found = Missed()
    for _ in range(2):
        found = missed_more(found, 10.0, 0.05, burst, 1.0)
    assert found == Missed(20.0, 0.0, 20.0, 60.0)
    assert over(found, 5.0, proven=True) == 0
    assert over(found, 5.0, proven=False) == 15
    assert missed_more(found, 0.0, 0.05, burst, 1.0) == Missed(20.0, 400.0)
    found = missed_more(found, 10.0, 0.05, burst, 1.0)
    assert found == Missed(30.0, 900.0, 0.0, 90.0)
    assert missed_more(found, 10.0, 0.05, burst, 0.5) == Missed(25.0, 225.0, 10.0, 120.0)


def test_a_burst_that_has_lasted_as_long_as_help_takes_is_followed_until_the_forecast_needs_no_more() -> None:
    burst, calm, more = came([60.0] * 30), came([1.0] * 30), Targets(4, 2)
    found = after([burst] * 2, [ALONE, more])
    assert trial(found, ALONE).chased_s == 0
    found = after([burst] * 3, [ALONE, more])
    assert trial(found, ALONE).chased_s == 30
    assert trial(found, Targets(6, 2)).chased_s == 0
    found = after([burst] * 8, [ALONE, more])
    helped = after([burst], [more], hedge=found)
    still, now = (each.trials[0].late.requests for each in (found, helped))
    assert now - still < 900
    found = after([calm], [ALONE], hedge=found)
    assert trial(found, ALONE).chased_s == 0


def test_an_expert_that_stands_still_is_tried_without_the_help_that_novelty_brings() -> None:
    """What it misses the first time, because it stands still, it would miss the second time, too."""
    burst, more = came([60.0] * 30, startup_s=10.0), Targets(4, 2)
    new, known = (
        after([burst] * 2, [ALONE, more], hedge=Hedge(most=most, followed=(ALONE,)))
        for most in (Targets(), Targets(8, 8))
    )
    still, follows = (trial(new, Targets(2, 1), follows=each) for each in (False, True))
    assert still.late.requests == trial(known, Targets(2, 1)).late.requests > follows.late.requests
    assert wants(still, Targets(9, 9), new) == Targets(9, 9), (
        "where it is trusted it goes along, all the same"
    )


def test_what_kept_the_promise_stays_until_another_has_saved_the_worth_of_a_change() -> None:
    def hedge(now: float, other: float, *, follows: bool) -> Hedge:
        trials = [ExpertTrial(ALONE, held_gpu_s=now), ExpertTrial(Targets(2, 1), follows, held_gpu_s=other)]
        return Hedge(tuple(trials), (ALONE,), 600.0, 100.0, trusted=(ALONE, True))

    assert trusted(hedge(1000.0, 300.0, follows=True)) == (ALONE, True)
    assert trusted(hedge(1000.0, 279.0, follows=True)) == (Targets(2, 1), True)


def test_to_stand_still_it_is_enough_to_have_saved_what_the_change_of_now_costs() -> None:
    def hedge(saved: float, wish: Targets) -> tuple[Targets, bool]:
        still = ExpertTrial(Targets(2, 1), False, held_gpu_s=1000.0 - saved)
        trials = (ExpertTrial(ALONE, held_gpu_s=1000.0), still)
        hedge = Hedge(trials, (ALONE,), 600.0, 100.0, trusted=(ALONE, True), most=Targets(8, 8))
        each = chosen(hedge, PANEL, PROMISE, 720.0, wish)
        return each.workers, each.follows

    for gpus, wish in enumerate((Targets(2, 1), Targets(3, 1), Targets(4, 1))):
        worth = gpus * 720.0 / BOX.max_gpus
        assert hedge(worth + 1, wish) == (Targets(2, 1), False)
        assert hedge(worth, wish) == (ALONE, True)


def test_one_that_held_no_more_and_missed_fewer_is_trusted_where_it_wants_the_same_workers() -> None:
    """The other has followed all the while, too: how it would fare standing still is not known."""
    two = Targets(2, 1)
    chased = ExpertTrial(two, False, chased_s=60.0, held_gpu_s=1000.0, late=Missed(4.0))
    followed_it = ExpertTrial(two, held_gpu_s=1000.0, late=Missed(3.0))

    def found(other: ExpertTrial, wish: Targets, now: ExpertTrial = chased) -> ExpertTrial:
        dearer = (
            ExpertTrial(each, follows, held_gpu_s=2000.0) for each, follows in PANEL.experts if each != two
        )
        hedge = Hedge((now, other, *dearer), (wish,), 600.0, 100.0, trusted=(two, False), most=Targets(8, 8))
        return chosen(hedge, PANEL, PROMISE, 720.0, wish)

    assert found(followed_it, Targets(4, 1)) == followed_it
    assert found(followed_it, ALONE) == followed_it
    assert found(followed_it, Targets(4, 1), standing := replace(chased, chased_s=0.0)) == standing
    assert found(replace(followed_it, late=Missed(4.0)), ALONE) == chased
    assert found(replace(followed_it, held_gpu_s=1001.0), ALONE) == chased


def test_where_nothing_keeps_the_promise_the_cheapest_that_is_hardly_worse_than_the_best_is_trusted() -> None:
    missed = {ALONE: 60.0, Targets(2, 1): 34.0, Targets(3, 1): 31.0, Targets(4, 1): 30.0}
    trials = [
        ExpertTrial(workers, False, held_gpu_s=BOX.gpus(workers) * 600.0, late=Missed(late))
        for workers, late in missed.items()
    ]
    hedge = Hedge(tuple(trials), (ALONE,), 600.0, 100.0)
    panel = ExpertPanel(replace(BOX, max_gpus=5), is_aggregated=False)
    others = [each for each in panel.experts if each not in [(each, False) for each in missed]]
    worse = [ExpertTrial(workers, follows, late=Missed(90.0)) for workers, follows in others]

    each = chosen(replace(hedge, trials=(*trials, *worse)), panel, PROMISE, 720.0, ALONE)
    assert each.workers == Targets(2, 1)


def test_in_the_order_of_arrival_more_are_late_than_where_late_prompts_give_way() -> None:
    burst = came([30.0] * 30)
    by_deadline, in_order = (after([replace(burst, by_deadline=each)] * 2) for each in (True, False))
    workers = Targets(1, 2)
    assert trial(by_deadline, workers).late.requests < trial(in_order, workers).late.requests


def test_nobody_stands_still_below_what_the_mean_load_needs() -> None:
    calm = after([came([1.0] * 30)], hedge=Hedge(leasts=(Targets(3, 2),), most=Targets(8, 8)))
    assert held(calm, ALONE) == 5 * 30
    assert held(calm, ALONE, follows=True) == 2 * 30


def test_workers_that_the_mean_load_needs_serve_once_it_has_needed_them_for_the_start_up_time() -> None:
    burst, known = came([60.0] * 30, startup_s=60.0), Hedge(most=Targets(8, 8))
    new, old = (replace(known, leasts=(first, *[Targets(5, 2)] * 2)) for first in (ALONE, Targets(5, 2)))
    late = [trial(after([burst], hedge=each), ALONE).late.requests for each in (new, old)]
    assert late[0] > late[1] + 100


def test_an_interval_without_requests_empties_the_queues_and_costs_its_gpus() -> None:
    busy = after([came([60.0] * 30)])
    silent = tried(busy, PANEL, Arrived(30.0, 60.0), PROMISE, 0.5)

    assert busy.trials[0].queue > 100
    assert {(each.queue, each.in_time, each.decoding.total) for each in silent.trials} == {(0.0, 0.0, 0)}
    assert held(silent, ALONE) == pytest.approx(0.5 * held(busy, ALONE) + 60)
    assert (silent.seconds, silent.requests) == (45.0, 900.0)


def test_a_request_over_both_targets_is_late_once() -> None:
    hedge = after([came([200.0] * 60)])
    assert all(each.late.requests + each.long.requests <= hedge.requests + 1e-6 for each in hedge.trials)


def test_an_expert_that_is_tried_for_the_first_time_begins_as_following_alone() -> None:
    small = after([came([60.0] * 30)], panel=ExpertPanel(WorkerLimits(max_gpus=4), is_aggregated=False))
    trials = {(each.workers, each.follows): each for each in PANEL.trials(small)}

    assert trials[Targets(6, 2), False].held_gpu_s == trials[ALONE, True].held_gpu_s > 0
    assert trials[Targets(3, 1), False].held_gpu_s == held(small, Targets(3, 1))


def test_aggregated_workers_are_tried_too_in_the_order_of_arrival() -> None:
    panel = ExpertPanel(replace(BOX, least=Targets(0, 1)), is_aggregated=True)
    hedge = after([came([40.0] * 30, service=AGGREGATED)] * 4, [Targets(0, 1)], panel)
    late = [trial(hedge, Targets(0, number)).late.requests for number in range(1, 9)]

    assert late[0] > 1000
    assert late == sorted(late, reverse=True)
    assert late[-1] < 0.05 * hedge.requests
    assert panel.experts[0] == (Targets(0, 1), True)


def test_an_itl_is_too_long_by_chance_for_half_of_the_requests_at_the_edge_and_for_fewer_in_turns() -> None:
    work = work_of()
    edge = work.most_in_time
    assert work.step_ms(edge) == pytest.approx(PROMISE.itl_ms, rel=1e-3)
    assert long_by_chance(2 * edge, 2, work) == pytest.approx(0.5)
    assert 0 < long_by_chance(0.9 * edge, 1, work) < 0.5 < long_by_chance(1.1 * edge, 1, work)
    at_random = work_of(replace(SERVICE, is_evenly_routed=False))
    assert long_by_chance(1.8 * edge, 2, work) < long_by_chance(1.8 * edge, 2, at_random)
    assert long_by_chance(0.0, 1, work) == 0.0
