"""The closed forms give the numbers of the textbooks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from dynaplan.planner.sizing.queueing.waiting import gamma_tail, normal_tail, probability_of_waiting
from tests.unit.planner.sizing.queueing.test_decode_model import DEMAND, KIND


def test_a_pool_at_the_edge_of_its_capacity_has_a_percentile_beyond_every_time() -> None:
    service, workers = QueueingModel(KIND, KIND), PoolSizes(1, 1000)
    used = SteadyState(service, DEMAND).prefill_waiting(1).utilisation
    edge = replace(DEMAND, requests_per_s=DEMAND.requests_per_s / used * (1 - 1e-9))
    prediction = SteadyState(service, edge).predict(workers, SlaTargets())
    assert not prediction.overload
    assert prediction.ttft_ms == math.inf


def test_decode_workers_that_are_overloaded_are_late_however_many_prefill_workers_there_are() -> None:
    state = SteadyState(QueueingModel(KIND, KIND), replace(DEMAND, requests_per_s=200.0))
    assert state.decode_batch(1).overload
    assert state.chance_of_ttft_over(1e9, PoolSizes(1000, 1)) == 1.0
    assert state.chance_of_ttft_over(1e9, PoolSizes(1000, 1000)) < 1.0


@pytest.mark.parametrize(
    ("servers", "load", "expected"), [(1, 0.7, 0.7), (2, 1.0, 1 / 3), (10, 8.0, 0.40918), (5, 4.0, 0.55411)]
)
def test_erlangs_c(servers: int, load: float, expected: float) -> None:
    assert probability_of_waiting(servers, load) == pytest.approx(expected, abs=1e-5)


def test_without_load_nobody_waits_and_with_too_much_everybody() -> None:
    assert probability_of_waiting(3, 0.0) == 0.0
    assert probability_of_waiting(3, 3.0) == probability_of_waiting(3, 1e6) == 1.0


@pytest.mark.parametrize("value", [0.5, 1.0, 2.0, 3.0, 4.0])
def test_a_gamma_variable_of_deviation_one_is_exponential(value: float) -> None:
    assert gamma_tail(value, 1.0, 1.0) == pytest.approx(math.exp(-value), abs=0.01)


def test_what_does_not_vary_is_above_or_below() -> None:
    assert gamma_tail(1.0, 2.0, 0.0) == 1.0
    assert gamma_tail(2.0, 2.0, 0.0) == 0.0
    assert gamma_tail(1.0, 0.0, 0.0) == 0.0
    assert gamma_tail(0.0, 1.0, 1.0) == 1.0


def test_a_normal_variable() -> None:
    assert normal_tail(0.0) == 0.5
    assert normal_tail(1.6449) == pytest.approx(0.05, abs=1e-5)
