from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynaplan.contract.traffic import Lengths
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.planner.model import Demand
from dynaplan.planner.sizing.queueing.decode_model import DecodeBatch
from dynaplan.planner.sizing.queueing.workload import WorkerKind, answers_of, prompts_of

DEMAND = Demand(1.0, Lengths.fixed(400.0), Lengths.fixed(100.0))
KIND = WorkerKind(
    StepTiming(lambda tokens: 5.0 + 0.1 * tokens, lambda decodes, _kv: 8.0 + 0.01 * decodes),
    EngineSettings(
        total_blocks=20_000, block_tokens=16, context_tokens=4096, batched_tokens=2048, request_slots=64
    ),
)


def worker(requests_per_s: float, kind: WorkerKind = KIND, *, is_aggregated: bool = False) -> DecodeBatch:
    prompts = prompts_of(DEMAND, kind) if is_aggregated else None
    return DecodeBatch(answers_of(DEMAND, kind), prompts, kind, requests_per_s / 1000, 1.0)


def test_full_slots_are_an_overload_in_which_every_answer_is_late() -> None:
    batch = worker(200.0)
    assert batch.overload == "the 64 slots of a worker are full"
    assert batch.chance_of_itl_over(1e9) == 1.0


def test_a_full_kv_cache_is_an_overload() -> None:
    tight = replace(KIND, settings=replace(KIND.settings, total_blocks=100))
    assert worker(20.0, tight).overload == "the KV cache of a worker is full"


def test_prompts_that_take_all_of_the_time_are_an_overload() -> None:
    batch = worker(30.0, is_aggregated=True)
    assert batch.overload == "prompts come faster than they can be computed"
    assert batch.mean_ttft_ms == math.inf
    assert batch.chance_of_ttft_over(1e9) == 1.0


def test_prompts_that_do_not_fit_the_tokens_of_a_step_are_an_overload() -> None:
    narrow = replace(KIND, settings=replace(KIND.settings, batched_tokens=20))
    assert (
        worker(18.0, narrow, is_aggregated=True).overload == "prompts need more than the 20 tokens of a step"
    )


def test_a_worker_without_prompts_has_no_ttft() -> None:
    batch = worker(1.0)
    assert not batch.overload
    assert (batch.mean_ttft_ms, batch.chance_of_ttft_over(1e9)) == (math.inf, 1.0)


@pytest.mark.parametrize(("limit_ms", "chance"), [(7.0, 1.0), (9.0, 0.0)])
def test_steps_that_all_take_as_long_are_late_all_or_none(limit_ms: float, chance: float) -> None:
    even = replace(KIND, timing=StepTiming(lambda tokens: 5.0, lambda decodes, _kv: 8.0))
    assert worker(1.0, even).chance_of_itl_over(limit_ms) == chance


def test_near_saturation_the_search_for_the_balance_stops_before_it() -> None:
    slow = replace(
        KIND,
        timing=StepTiming(lambda tokens: 5.0, lambda decodes, _kv: 8.0 + decodes),
        settings=replace(KIND.settings, request_slots=2000, total_blocks=40_000),
    )
    assert 100.0 < worker(10.0, slow).step_ms < 900.0  # step = 8 + 1 + 0.99 step has its balance at 900 ms


def test_an_answer_of_a_token_beside_very_long_ones_averages_nothing_out() -> None:
    demand = replace(DEMAND, osl=Lengths((2.0, 60_000.0), (1.0, 1.0, 0.0)))
    batch = DecodeBatch(answers_of(demand, KIND), None, KIND, 1e-6, 1.0)
    assert 0.0 <= batch.chance_of_itl_over(8.5) <= batch.chance_of_itl_over(8.1) <= 1.0
