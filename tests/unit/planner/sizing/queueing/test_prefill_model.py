from __future__ import annotations

import math

import pytest

from dynaplan.planner.forecasting.arrivals import dispersions_of
from dynaplan.planner.sizing.queueing.prefill_model import PrefillWaiting
from dynaplan.planner.sizing.queueing.workload import prompts_of
from tests.unit.planner.sizing.queueing.test_decode_model import DEMAND, KIND


def pool(requests_per_s: float) -> PrefillWaiting:
    return PrefillWaiting(prompts_of(DEMAND, KIND), KIND, 1, requests_per_s / 1000, 1.0)


def test_an_overloaded_pool_never_answers() -> None:
    overloaded = pool(1000.0)
    assert overloaded.is_overloaded
    assert overloaded.mean_ms == math.inf
    assert overloaded.chance_over(1e9) == 1.0


def test_a_pool_without_requests_takes_the_time_of_one_prompt() -> None:
    idle = pool(0.0)
    assert not idle.is_overloaded
    assert idle.mean_ms == 5.0 + 0.1 * 400


LIMIT_MS = 450.0


def late_of_a_clock(size: int, workers: int) -> tuple[float, float]:
    """The part of prompts that take too long when ``size`` of them come every 3 s: computed, and modelled.

    The computing is that of the engine model: a free worker takes up to K prompts into a step of F + n own.
    """
    free, late, left = [0.0] * workers, 0, size
    while left:
        taken = min(KIND.concurrent_prefills, left)
        worker = free.index(min(free))
        free[worker] += 5.0 + taken * 0.1 * 400
        late += taken * (free[worker] > LIMIT_MS)
        left -= taken
    scales = dispersions_of([float(size), 0.0, 0.0] * 10, 30.0)
    prompts = prompts_of(DEMAND, KIND)
    waiting = PrefillWaiting(prompts, KIND, workers, size / 3000, scales[0][1], scales)
    return late / size, waiting.chance_over(LIMIT_MS)


@pytest.mark.parametrize(("size", "workers"), [(6, 1), (9, 1), (15, 2), (24, 3)])
def test_batches_of_a_clock_that_are_computed_in_time_are_expected_in_time(size: int, workers: int) -> None:
    computed, modelled = late_of_a_clock(size, workers)
    assert computed == 0
    assert modelled < 0.05


@pytest.mark.parametrize(("size", "workers"), [(15, 1), (30, 2), (60, 4)])
def test_batches_of_a_clock_that_are_too_large_are_expected_late(size: int, workers: int) -> None:
    computed, modelled = late_of_a_clock(size, workers)
    assert computed > 0.05
    assert modelled > 0.05


def test_arrivals_of_independent_clients_need_no_scales() -> None:
    scales = ((1.0, 1.0), (2.0, 1.0))
    without = pool(10.0).chance_over(200.0)
    assert PrefillWaiting(prompts_of(DEMAND, KIND), KIND, 1, 0.01, 1.0, scales).chance_over(200.0) == without


def test_a_scale_without_dispersion_adds_nothing() -> None:
    one = PrefillWaiting(prompts_of(DEMAND, KIND), KIND, 1, 0.01, 2.0)
    two = PrefillWaiting(prompts_of(DEMAND, KIND), KIND, 1, 0.01, 2.0, ((1.0, 0.0),))
    assert one.chance_over(200.0) == two.chance_over(200.0)
