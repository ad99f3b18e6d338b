"""The search for the best split that stands still, on results that are made up and on simulated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.best_static import BestStatic, find_best_static
from dynaplan.simulation.outcome import Outcome, Slo
from dynaplan.simulation.run import Result, StaticPolicy, simulate
from dynaplan.simulation.simulated_service import ServiceSettings
from tests.unit.simulation.services import ENGINE, TIMING, every, service

PROMISE = SlaTargets(500, 50, 95, 95)
BOTH = {Role.PREFILL: 1, Role.DECODE: 1}


def settings_of(gpus: int, sizes: Mapping[Role, int]) -> ServiceSettings:
    """A box with that many GPUs, and workers of those sizes in GPUs."""
    return ServiceSettings(dict.fromkeys(sizes, (ENGINE, TIMING)), gpus, sizes, dict.fromkeys(sizes, 0.0))


def search(gpus: int, in_time: Callable[[int, int], int], sizes: Mapping[Role, int] = BOTH) -> BestStatic:
    """Search on an hour of a hundred requests, of which ``in_time`` meet both targets with a split."""

    def simulate_split(split: PoolSizes) -> Result:
        met = in_time(split.prefill, split.decode)
        outcome = Outcome(Slo(500, 50), requests=100, ttft_met=met, itl_met=met, both_met=met)
        held = sum(split.of(role) * size for role, size in sizes.items())
        return Result("static", outcome, float(held), 3600.0, 3600.0, 0, 0)

    return find_best_static(simulate_split, settings_of(gpus, sizes), PROMISE)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("prefill", [1, 2, 4])
@pytest.mark.parametrize("decode", [1, 3, 4])
def test_it_is_the_cheapest_split_that_keeps_the_promise(prefill, decode, sizes):
    by_role = dict(zip((Role.PREFILL, Role.DECODE), sizes, strict=True))

    found = search(16, lambda p, d: 100 if p >= prefill and d >= decode else 40, by_role)

    assert found.best.workers == PoolSizes(prefill, decode)
    assert found.best.is_promise_kept
    assert found.best.gpu_hours == prefill * sizes[0] + decode * sizes[1]


def test_where_workers_stand_in_for_each_other_none_with_fewer_gpus_keeps_the_promise():
    def in_time(prefill: int, decode: int) -> int:
        return min(100, 8 * prefill + 13 * decode)

    found = search(16, in_time, {Role.PREFILL: 1, Role.DECODE: 2})

    splits = [(p, d) for p in range(1, 15) for d in range(1, 8) if p + 2 * d <= 16]
    assert found.best.is_promise_kept
    assert found.best.gpu_hours == min(p + 2 * d for p, d in splits if in_time(p, d) >= 95)


def test_of_splits_with_as_many_gpus_the_one_with_most_requests_in_time_is_best():
    met = {(1, 3): 95, (2, 2): 99, (3, 1): 97}

    found = search(8, lambda p, d: met.get((p, d), 100 if p + d > 4 else 50))

    assert found.best.workers == PoolSizes(2, 2)


def test_where_no_split_keeps_the_promise_the_one_with_most_in_time_is_best():
    found = search(8, lambda p, d: 10 * min(p, 2 * d))

    assert not found.best.is_promise_kept
    assert (found.best.workers, found.best.attainment) == (PoolSizes(5, 3), 0.5)


@pytest.mark.parametrize(
    ("least", "gpus", "size", "expected"), [(3, 8, 1, 3), (1, 8, 2, 1), (9, 8, 1, 8), (5, 9, 2, 4)]
)
def test_aggregated_workers_are_a_single_row(least, gpus, size, expected):
    found = search(gpus, lambda p, d: 100 if d >= least else 10 * d, {Role.DECODE: size})

    assert found.best.workers == PoolSizes(0, expected)
    assert found.best.is_promise_kept == (expected >= least)
    assert str(found.best) == str(expected)


def test_each_split_is_tried_once_and_few_are():
    found = search(16, lambda p, d: 100 if p >= 4 and d >= 3 else 40)

    tried = [each.workers for each in found.tried]
    assert len(set(tried)) == len(tried) <= 20


def test_a_load_without_requests_needs_one_worker_of_each_role():
    empty = Result("static", Outcome(Slo(500, 50)), 0.0, 0.0, 0.0, 0, 0)

    assert find_best_static(lambda _: empty, settings_of(8, BOTH), PROMISE).best.workers == PoolSizes(1, 1)


@pytest.mark.parametrize("is_disaggregated", [False, True])
def test_simulating_every_split_finds_no_cheaper_one(is_disaggregated):
    settings = service(is_disaggregated=is_disaggregated, gpus=6)
    trace = every(0.05, 400, prompt_tokens=120, output_tokens=60)

    def simulate_split(split: PoolSizes) -> Result:
        return simulate(trace, settings, split, StaticPolicy())

    found = find_best_static(simulate_split, settings, PROMISE)

    prefills = range(1, 6) if is_disaggregated else [0]
    splits = [PoolSizes(p, d) for p in prefills for d in range(1, 7 - p)]
    kept = [each.gpu_hours for each in map(simulate_split, splits) if each.outcome.keeps(PROMISE)]
    assert 0 < len(kept) < len(splits)
    assert found.best.is_promise_kept
    assert found.best.gpu_hours == min(kept)
