"""The smallest number that is enough, and what the limits leave of a demand."""

from __future__ import annotations

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import WorkerLimits
from dynaplan.planner.sizing.limits import MAX_WORKERS, find_smallest, within_limits


@pytest.mark.parametrize("least", [0, 1, 5, 100])
@pytest.mark.parametrize("needed", [0, 1, 2, 7, 63, 64, 65, 4095, 4096])
def test_the_smallest_number_that_is_enough_is_found(least: int, needed: int) -> None:
    assert find_smallest(lambda workers: workers >= needed, least) == max(least, needed)


def test_without_a_number_that_is_enough_it_is_the_largest() -> None:
    assert find_smallest(lambda _: False, 1) == MAX_WORKERS


def test_minimums_that_do_not_fit_change_nothing_and_the_step_names_what_they_need_within_the_maximums() -> (
    None
):
    limits = WorkerLimits(max_gpus=2, least=PoolSizes(4, 2), most=PoolSizes(1, 8))
    current = PoolSizes(1, 1)
    allowed, steps = within_limits(PoolSizes(9, 9), limits, current)
    assert allowed == current
    assert steps[-1].why == "the minimums need 3 GPUs, the budget has 2: change nothing"
