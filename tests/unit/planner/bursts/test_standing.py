"""Numbers of workers that stand still, tried on what came."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.memory import Standing
from dynaplan.planner.bursts.standing import learnt_floor, tried
from dynaplan.planner.model import Demand, WorkerLimits
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, measured_demand
from tests.unit.planner.rules.targets import model, traffic
from tests.unit.planner.sizing.engine_pools import Arrival, decode_times_ms

DISAGGREGATED = model().service
AGGREGATED = replace(DISAGGREGATED, prefill=None)
PROMISE = SlaTargets(500.0, 20.0)
EIGHT = WorkerLimits(max_gpus=8)
PER_WORKER = 18
"""Prompts/s that one prefill worker computes, some 19.2."""


def demand(isl: float = 3000, osl: float = 150) -> Demand:
    found = measured_demand(traffic(10.0, isl, osl))
    assert found
    return found


def after(
    arrivals: Sequence[float],
    before: Standing | None = None,
    service: ServiceModel = DISAGGREGATED,
    limits: WorkerLimits = EIGHT,
    of: Demand | None = None,
) -> Standing:
    """The trials after these arrivals, one number each second."""
    work = of or demand()
    return tried(before or Standing(), arrivals, service, work, PROMISE, 3600.0, float(len(arrivals)), limits)


def floor_of(trials: Standing, max_gpus: int = 16) -> Targets:
    """The floor of a disaggregated service on a box of that size."""
    return learnt_floor(trials, PROMISE, WorkerLimits(max_gpus=max_gpus))


def test_where_nothing_has_come_there_is_no_floor() -> None:
    assert floor_of(Standing()) == Targets()
    assert floor_of(after([0.0] * 30)) == Targets()


def test_steady_load_needs_what_carries_it() -> None:
    for workers in (1, 2, 3):
        assert floor_of(after([PER_WORKER * workers] * 60)).prefill == workers


def test_a_burst_after_a_silence_needs_what_carries_the_burst_and_not_the_mean() -> None:
    trials = after([0.0] * 120 + [float(3 * PER_WORKER)] * 60 + [0.0] * 120)

    assert floor_of(trials).prefill == 3
    assert trials.prefill[0].load == 0
    assert trials.prefill[0].late > trials.prefill[1].late > trials.prefill[2].late == 0


def test_a_burst_that_is_a_small_part_of_all_is_within_the_promise() -> None:
    trials = after([10.0] * 600 + [40.0] * 3)

    assert 0 < trials.prefill[0].late < 0.05 * trials.requests
    assert floor_of(trials).prefill == 1


def test_what_is_left_of_a_burst_makes_the_next_interval_late() -> None:
    busy = after([60.0] * 30)
    calm = after([5.0] * 30, busy)

    assert calm.prefill[0].late > busy.prefill[0].late
    assert calm.prefill[3].late == pytest.approx(busy.prefill[3].late, rel=0.01)


def test_the_past_fades_with_the_window() -> None:
    trials = after([60.0] * 60)
    for _ in range(200):
        trials = after([1.0] * 60, trials)

    assert floor_of(trials).prefill == 1


def test_where_the_gpus_do_not_keep_the_promise_it_is_the_cheapest_that_is_hardly_worse() -> None:
    hopeless = after([5000.0] * 60)
    assert hopeless.prefill[7].late > 0.9 * hopeless.requests
    assert floor_of(hopeless) == Targets(1, 1)
    scarce = after([0.0] * 30 + [90.0] * 30)
    assert floor_of(scarce, max_gpus=16).prefill >= 5
    split = floor_of(scarce, max_gpus=4)
    assert split.prefill + split.decode <= 4
    assert floor_of(scarce, max_gpus=1) == Targets()


def test_decode_workers_are_for_the_itl_and_for_what_they_hold() -> None:
    long = demand(isl=100, osl=2000)
    assert floor_of(after([40.0] * 200, of=long)).decode > 1
    assert floor_of(after([1.0] * 200, of=long)).decode == 1
    crowd = after([400.0] * 60, of=long)
    assert crowd.decode[0].late > 0.8 * crowd.requests
    assert crowd.decode[0].load > 3 * crowd.decode[7].load / 8
    drained = after([0.0] * 20_000, crowd, of=long)
    assert drained.decode[0].load < 1


def test_prompts_come_to_decode_no_faster_than_the_prefill_workers_beside_it_compute_them() -> None:
    """On a small box a batch reaches a decode worker slowly enough; on a large one it does not."""
    batch = [0.0] * 5 + [400.0] + [0.0] * 100
    small, large = (after(batch, limits=WorkerLimits(max_gpus=gpus)) for gpus in (2, 12))

    assert small.prefill[0].late > large.prefill[10].late
    assert small.decode[0].late < 0.1 * 400 < large.decode[0].late
    assert large.decode[10].late == pytest.approx(0.0, abs=1.0)


def test_a_number_that_is_tried_for_the_first_time_has_missed_nothing_yet() -> None:
    two = after([100.0] * 30, limits=WorkerLimits(max_gpus=2))
    four = after([1.0] * 30, two, limits=WorkerLimits(max_gpus=4))

    assert len(two.prefill) == 2 and len(four.decode) == 4
    assert four.prefill[3].late == 0 < four.prefill[1].late
    assert len(after([1.0], four, limits=WorkerLimits(max_gpus=1)).prefill) == 1


def test_aggregated_workers_compute_prompts_beside_their_steps() -> None:
    def floor(arrivals: Sequence[float]) -> Targets:
        trials = after(arrivals, service=AGGREGATED)
        return learnt_floor(trials, PROMISE, WorkerLimits(), is_aggregated=True)

    assert floor([2.0] * 120) == Targets(0, 1)
    busy = floor([30.0] * 120)
    assert busy.prefill == 0 and busy.decode > 2


@pytest.mark.parametrize("rate_per_s", [20.0, 30.0, 40.0])
def test_as_many_answers_of_aggregated_workers_are_too_slow_as_of_a_pool_of_engines(
    rate_per_s: float,
) -> None:
    """A minute in three at that rate."""
    dice, requests = random.Random(1), []
    for begin_s in (0.0, 180.0, 360.0):
        at_s = begin_s + dice.expovariate(rate_per_s)
        while at_s < begin_s + 60:
            requests.append(Arrival(at_s, 3000, 150))
            at_s += dice.expovariate(rate_per_s)
    came = Counter(int(each.at_s) for each in requests)
    trials = after([float(came[second]) for second in range(540)], service=AGGREGATED)
    for workers in range(1, 6):
        _, itls_ms = decode_times_ms(AGGREGATED.decode, workers, requests, is_remote=False)
        simulated = sum(each > PROMISE.itl_ms for each in itls_ms) / len(itls_ms)
        assert trials.decode[workers - 1].late / trials.requests == pytest.approx(simulated, abs=0.12)
