"""The predictions, held against engine models in virtual time. tests/bench/sla.py does so at length."""

from __future__ import annotations

from functools import cache

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.config.settings.worker import SimOptions
from dynaplan.contract.counts import PoolSizes
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from tests.unit.planner.sizing.engine_pools import (
    Shape,
    arrivals,
    decode_times_ms,
    demand_of,
    percentile,
    prefill_times_ms,
)

TARGETS = SlaTargets()
PLENTY = 50

# Of what was simulated: hardly ever less (a pool that is too small), nor much more (one that is too large).
LOW, HIGH = 0.9, 1.45


@cache
def kind(profile: str) -> WorkerKind:
    options = SimOptions(profile=profile, block_tokens=64)
    timing, kv_tokens = timing_for(options)
    return WorkerKind(timing, EngineSettings.of(options, kv_tokens))


H200, FITTED = "h200_sxm-Llama-3.1-8B-Instruct-FP8", "h100-bf16"


@pytest.mark.parametrize(
    ("profile", "workers", "rate_per_s"),
    [(H200, 1, 19.0), (H200, 2, 54.0), (H200, 4, 107.0), (FITTED, 2, 42.0), (FITTED, 4, 100.0)],
)
def test_the_prefill_percentile_is_that_of_a_pool_of_engines(
    profile: str, workers: int, rate_per_s: float
) -> None:
    requests = arrivals(Shape(osl=2, osl_variation=0.0), rate_per_s, 3000)
    simulated_ms = percentile(prefill_times_ms(kind(profile), workers, requests), 95)
    queue = SteadyState(
        QueueingModel(kind(profile), kind(profile)), demand_of(requests, rate_per_s)
    ).prefill_waiting(workers)
    assert queue.chance_over(LOW * simulated_ms) >= 0.05
    assert queue.chance_over(HIGH * simulated_ms) <= 0.05


@pytest.mark.parametrize(
    ("profile", "workers", "rate_per_s"),
    [(H200, 1, 8.0), (H200, 2, 35.0), (H200, 3, 66.0), (FITTED, 2, 52.0)],
)
def test_the_itl_percentile_is_that_of_decoding_engines(
    profile: str, workers: int, rate_per_s: float
) -> None:
    requests = arrivals(Shape(), rate_per_s, 2000)
    _, itls_ms = decode_times_ms(kind(profile), workers, requests, is_remote=True)
    service = QueueingModel(kind(profile), kind(profile))
    predicted = SteadyState(service, demand_of(requests, rate_per_s)).predict(
        PoolSizes(PLENTY, workers), TARGETS
    )
    assert LOW <= predicted.itl_ms / percentile(itls_ms, 95) <= HIGH


@pytest.mark.parametrize(
    ("profile", "workers", "rate_per_s"),
    [(H200, 1, 7.0), (H200, 3, 30.0), (FITTED, 1, 14.0), (FITTED, 2, 40.0)],
)
def test_both_percentiles_are_those_of_aggregated_engines(
    profile: str, workers: int, rate_per_s: float
) -> None:
    requests = arrivals(Shape(), rate_per_s, 1500)
    ttfts_ms, itls_ms = decode_times_ms(kind(profile), workers, requests, is_remote=False)
    state = SteadyState(QueueingModel(kind(profile)), demand_of(requests, rate_per_s))
    predicted = state.predict(PoolSizes(0, workers), TARGETS)
    assert LOW <= predicted.itl_ms / percentile(itls_ms, 95) <= HIGH
    # Workers that take turns wait less than those that are drawn, which is what is predicted.
    assert LOW <= predicted.ttft_ms / percentile(ttfts_ms, 95) <= 1.8
