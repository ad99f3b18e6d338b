"""The limit of running requests: the most that keep the ITL target, and who may wait in front of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.planner.model import Demand
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from dynaplan.planner.sizing.running_limit import FullWorker, limit_of, most_running

TIMING = StepTiming(lambda tokens: 5.0 + 0.1 * tokens, lambda decodes, kv: 5.0 + decodes + 0.001 * kv)
KIND = WorkerKind(TIMING, EngineSettings(total_blocks=10_000, request_slots=64))
DEMAND = Demand(2.0, Lengths.fixed(100), Lengths.fixed(101))
AGGREGATED = SteadyState(QueueingModel(KIND), DEMAND)
DISAGGREGATED = SteadyState(QueueingModel(KIND, KIND), DEMAND)
WORKERS = PoolSizes(1, 1)


def test_a_step_holds_the_batch_its_context_and_the_prompts_that_begin() -> None:
    # A request in the middle of its answer has 100 + 50 tokens; its context varies by 29.
    assert FullWorker(DISAGGREGATED, 10).step_ms == pytest.approx(5 + 10 + 1.5 + 0.15, rel=0.01)
    # Each of 10 requests begins once in 100 steps, and costs 10 ms then.
    assert FullWorker(AGGREGATED, 10).step_ms == pytest.approx(16.65 + 10 * 10 / 100, rel=0.01)


def test_the_most_is_the_last_number_that_keeps_the_target() -> None:
    most = most_running(DISAGGREGATED, 20.0)
    assert FullWorker(DISAGGREGATED, most).step_ms <= 20.0 < FullWorker(DISAGGREGATED, most + 1).step_ms
    assert most_running(AGGREGATED, 20.0) < most


def test_a_target_that_one_request_breaks_allows_none_and_a_wide_one_all_slots() -> None:
    assert most_running(AGGREGATED, 5.0) == 0
    assert most_running(AGGREGATED, 500.0) == 64


def test_the_wait_is_what_the_ttft_leaves() -> None:
    def wait_s(ttft_ms: float) -> float:
        return limit_of(AGGREGATED, 10, SlaTargets(ttft_ms, 20.0), WORKERS).wait_s

    own_ms = FullWorker(AGGREGATED, 10).first_ms(WORKERS, 95.0)
    assert 20 < own_ms < 60
    assert wait_s(500.0) == pytest.approx((500 - own_ms) / 1000)
    assert wait_s(own_ms / 2) == 0.0


def test_places_are_freed_at_the_pace_of_full_workers() -> None:
    limit = limit_of(AGGREGATED, 10, SlaTargets(500.0, 20.0), WORKERS)
    step_ms = FullWorker(AGGREGATED, 10).step_ms
    assert limit.ends_per_s == pytest.approx(10 / (101 * step_ms / 1000 + 0.01), rel=0.02)


def test_requests_whose_prompt_is_computed_elsewhere_have_places_beside_those_that_decode() -> None:
    busy = replace(DEMAND, requests_per_s=50.0)
    limit = limit_of(SteadyState(DISAGGREGATED.service, busy), 10, SlaTargets(), WORKERS)
    assert limit.most >= 11
    assert limit_of(SteadyState(AGGREGATED.service, busy), 10, SlaTargets(), WORKERS).most == 10


def test_where_prompts_come_faster_than_they_are_computed_nobody_waits_in_front() -> None:
    flood = SteadyState(DISAGGREGATED.service, replace(DEMAND, requests_per_s=500.0))
    limit = limit_of(flood, 10, SlaTargets(2000.0, 20.0), WORKERS)
    assert (limit.wait_s, limit.ends_per_s) == (0.0, 0.0)


@settings(max_examples=40, deadline=None)
@given(st.floats(1, 100), st.floats(1, 3), st.booleans())
def test_a_wider_target_never_allows_fewer(itl_ms: float, factor: float, is_aggregated: bool) -> None:
    state = AGGREGATED if is_aggregated else DISAGGREGATED
    most = most_running(state, itl_ms)
    assert most <= most_running(state, itl_ms * factor)
    assert all(FullWorker(state, number).step_ms <= itl_ms for number in range(1, most + 1))
