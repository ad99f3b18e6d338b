"""A program gets the GPUs that cost least; where there are too few it is said who has them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.rules.lending import LendableGpu, choose_lent
from dynaplan.graph.lifecycle import Worker
from dynaplan.util.amounts import GIB
from dynaplan.util.errors import CapacityError, ConfigError
from tests.unit.fleet.rules.graphs import FAILED, STARTING, worker


def gpu(index: int, *workers: Worker, size_gb: int = 80) -> LendableGpu:
    return LendableGpu(Gpu(index, f"GPU-SIM-{index}", memory_bytes=size_gb * GIB), workers)


def chosen(gpus: list[LendableGpu], number: int = 1, least_bytes: int = 0) -> list[int]:
    return [each.gpu.index for each in choose_lent(gpus, number, least_bytes)]


FREE = gpu(0)
SILENT = gpu(1, worker("VllmWorker_1", STARTING))
UNUSED = replace(gpu(2, worker("A")), is_on_request=True, last_use_unix_s=10.0)
USED = replace(gpu(3, worker("B")), is_on_request=True, last_use_unix_s=99.0)
ANSWERING = replace(gpu(4, worker("C")), is_on_request=True, in_flight=1)
SURPLUS = gpu(5, worker("VllmWorker_3"))
FIRST = gpu(6, worker("VllmWorker"))
PINNED = replace(gpu(7, worker("D")), is_on_request=True, is_pinned=True)
BY_COST = [FREE, SILENT, UNUSED, USED, ANSWERING, SURPLUS, FIRST, PINNED]


def test_what_costs_least_is_lent_first_and_a_pinned_model_last() -> None:
    left = list(reversed(BY_COST))
    for expected in BY_COST:
        assert chosen(left) == [expected.gpu.index]
        left.remove(expected)


def test_of_equal_gpus_that_of_the_highest_index_is_lent() -> None:
    assert chosen([gpu(0), gpu(1), gpu(2)], 2) == [1, 2]
    assert chosen([gpu(0, worker("A", FAILED)), gpu(1, worker("B", STARTING))]) == [0]


def test_a_gpu_with_too_little_memory_is_left_out() -> None:
    assert chosen([gpu(0), gpu(1, size_gb=16)], least_bytes=20 * 10**9) == [0]
    taken = replace(gpu(0), taken="lent to alice")
    assert chosen([gpu(0)], least_bytes=85_900_000_000) == [0]  # 80.0 GiB, as it is shown
    with pytest.raises(CapacityError, match=r"GPU 1: its 16 GiB are less than is asked for"):
        chosen([taken, gpu(1, size_gb=16)], least_bytes=20 * 10**9)


def test_too_few_gpus_are_told_with_who_has_each() -> None:
    lent = replace(gpu(0), taken="lent to alice")
    with pytest.raises(
        CapacityError, match=r"2 of 2 GPUs asked for, and 1 can be lent now\n  GPU 0: lent to alice"
    ):
        chosen([lent, gpu(1)], 2)


def test_more_than_the_box_has_is_never_waited_for() -> None:
    with pytest.raises(ConfigError, match="--gpus is 3, and this box has 2"):
        chosen([gpu(0), gpu(1)], 3)
    with pytest.raises(ConfigError, match="--gpus is 1, and this box has 0 with 900 GiB or more"):
        chosen([gpu(0), gpu(1)], least_bytes=900 * 2**30)
