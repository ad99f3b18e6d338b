"""The sizes that the queueing model gives, and the reasons it tells."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.planner.model import Demand, Prediction, Sizing, WorkerLimits
from dynaplan.planner.sizing.pool_sizes import size_pools
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from dynaplan.planner.sizing.queueing.workload import WorkerKind
from tests.unit.planner.sizing.engine_pools import Shape, arrivals, decode_times_ms, demand_of, percentile
from tests.unit.planner.sizing.queueing.test_queueing_model_against_engine import FITTED, H200, kind

DISAGGREGATED = QueueingModel(kind(H200), kind(H200))
AGGREGATED = QueueingModel(kind(H200))
LIMITS = WorkerLimits(max_gpus=64)
LIKE_CHATS = demand_of(arrivals(Shape(), 1.0, 3000), 30.0)
PROMISE = SlaTargets(500.0, 20.0)
CURRENT = PoolSizes(1, 1)

SMALL_MODEL = StepTiming(
    lambda tokens: 12 + 6.0 * tokens, lambda batch, kv: 9 + 20.0 * max(0, batch - 1) + 1e-3 * kv
)
"""As of llama.cpp with a small model on one core."""


def meets(prediction: Prediction, targets: SlaTargets) -> bool:
    return prediction.ttft_ms <= targets.ttft_ms and prediction.itl_ms <= targets.itl_ms


def sized(demand: Demand, promise: SlaTargets = PROMISE, service: QueueingModel = DISAGGREGATED) -> Sizing:
    least = PoolSizes(1, 1) if service.prefill else PoolSizes(0, 1)
    return size_pools(service, demand, promise, replace(LIMITS, least=least), CURRENT)


@pytest.mark.parametrize("service", [DISAGGREGATED, AGGREGATED])
def test_both_targets_hold_and_with_a_worker_less_one_of_them_does_not(service: QueueingModel) -> None:
    sizing = sized(LIKE_CHATS.scaled(3), service=service)
    state = SteadyState(service, LIKE_CHATS.scaled(3))
    assert sizing.prediction
    assert meets(sizing.prediction, PROMISE)
    fewer = [replace(sizing.workers, decode=sizing.workers.decode - 1)]
    if service.prefill:
        fewer.append(replace(sizing.workers, prefill=sizing.workers.prefill - 1))
    assert not any(meets(state.predict(each, PROMISE), PROMISE) for each in fewer)


def test_the_story_says_what_a_worker_less_would_mean() -> None:
    sizing = sized(LIKE_CHATS.scaled(3))
    reasons = {step.stage: step.why for step in sizing.steps}
    assert list(reasons) == ["demand", "decode", "prefill", "budget"]
    assert "90 requests/s" in reasons["demand"]
    for stage in ("decode", "prefill"):
        assert "; with " in reasons[stage]
    assert sizing.steps[-1].after == sizing.workers


def test_an_aggregated_deployment_has_no_prefill_workers_and_more_of_the_others() -> None:
    aggregated = sized(LIKE_CHATS, service=AGGREGATED).workers
    assert aggregated.prefill == 0
    assert aggregated.decode > sized(LIKE_CHATS).workers.decode


def test_a_heavy_tail_of_prompts_needs_more_than_their_mean() -> None:
    tail = demand_of(arrivals(Shape(3000, 2.0, 150, 0.5), 1.0, 5000), 40.0)
    assert tail.isl.mean_tokens
    mean = replace(tail, isl=Lengths.fixed(tail.isl.mean_tokens))
    promise = replace(PROMISE, ttft_ms=350.0)
    assert sized(tail, promise).workers.prefill > sized(mean, promise).workers.prefill


def test_a_higher_percentile_needs_no_fewer_workers() -> None:
    workers = [
        sized(LIKE_CHATS.scaled(4), replace(PROMISE, itl_percentile=each)).workers for each in (50, 95, 99)
    ]
    assert [each.decode for each in workers] == sorted(each.decode for each in workers)
    assert workers[0].decode < workers[-1].decode


def test_prompts_that_are_in_the_cache_need_fewer_workers() -> None:
    long = replace(LIKE_CHATS.scaled(3), isl=Lengths.fixed(6000))
    assert sized(replace(long, prefix_hit_rate=0.8)).workers.prefill < sized(long).workers.prefill


def test_bursts_need_no_fewer_workers() -> None:
    calm, bursty = LIKE_CHATS.scaled(4), replace(LIKE_CHATS.scaled(4), burstiness=6.0)
    assert sized(bursty).workers.decode >= sized(calm).workers.decode
    assert sized(bursty).prediction.ttft_ms > sized(calm).prediction.ttft_ms  # type: ignore[union-attr]


def test_workers_that_take_turns_do_no_worse() -> None:
    even = replace(AGGREGATED, is_evenly_routed=True)
    assert sized(LIKE_CHATS.scaled(5), service=even).workers.decode <= (
        sized(LIKE_CHATS.scaled(5), service=AGGREGATED).workers.decode
    )


def test_the_kv_cache_is_a_hard_bound() -> None:
    """The ITL target would allow a batch that the cache cannot hold."""
    promise = SlaTargets(5000.0, 500.0)
    long = Demand(10.0, Lengths.fixed(12_000), Lengths.fixed(1500))
    small = QueueingModel(kind(FITTED), kind(FITTED))
    sizing = sized(long, promise, small)
    assert sizing.prediction
    assert not sizing.prediction.overload
    assert "the KV cache of a worker" in next(each.why for each in sizing.steps if each.stage == "decode")
    assert sizing.prediction.kv_usage < 1


def test_a_target_that_nobody_can_meet_is_said_to_be_one_and_not_chased() -> None:
    sizing = sized(LIKE_CHATS, SlaTargets(5.0, 1.0))
    notes = [step.why for step in sizing.steps if step.stage == "targets"]
    assert len(notes) == 2
    assert "no number of workers meets it" in notes[0]
    assert sizing.workers.prefill < 32
    assert sizing.prediction
    assert not meets(sizing.prediction, SlaTargets(5.0, 1.0))


@pytest.mark.parametrize(
    ("promise", "name"), [(SlaTargets(5.0, 20.0), "TTFT"), (SlaTargets(500.0, 1.0), "ITL")], ids=str
)
def test_only_the_target_out_of_reach_is_replaced(promise: SlaTargets, name: str) -> None:
    (note,) = (step.why for step in sized(LIKE_CHATS, promise).steps if step.stage == "targets")
    assert f"a request alone has a {name}" in note


def test_no_requests_need_the_minimums() -> None:
    sizing = sized(Demand(0.0, Lengths((), ()), Lengths((), ())))
    assert sizing.workers == PoolSizes(1, 1)
    assert "no demand" in sizing.steps[0].why


@pytest.mark.parametrize(
    "demand",
    [
        Demand(math.nan, Lengths.fixed(10), Lengths.fixed(10)),
        Demand(-1.0, Lengths.fixed(10), Lengths.fixed(10)),
        Demand(5.0, Lengths((), ()), Lengths.fixed(10)),
        Demand(5.0, Lengths.fixed(10), Lengths((10.0,), (0.0,))),
    ],
)
def test_a_demand_that_is_not_known_changes_nothing(demand: Demand) -> None:
    sizing = size_pools(DISAGGREGATED, demand, PROMISE, LIMITS, PoolSizes(3, 5))
    assert sizing.workers == PoolSizes(3, 5)
    assert "no data: change nothing" in sizing.steps[0].why


def test_answers_of_one_token_need_a_decode_worker_all_the_same() -> None:
    assert sized(Demand(5.0, Lengths.fixed(100), Lengths.fixed(1))).workers == PoolSizes(1, 1)


def test_slower_engines_need_more_workers() -> None:
    slower = DISAGGREGATED.slowed(1.5, 1.5)
    fast, slow = sized(LIKE_CHATS.scaled(3)).workers, sized(LIKE_CHATS.scaled(3), service=slower).workers
    assert slow.prefill > fast.prefill
    assert slow.decode > fast.decode


def test_the_minimums_and_the_budget_hold() -> None:
    limits = WorkerLimits(max_gpus=4, least=PoolSizes(1, 2))
    sizing = size_pools(DISAGGREGATED, LIKE_CHATS.scaled(10), PROMISE, limits, CURRENT)
    assert limits.gpus(sizing.workers) == 4
    assert sizing.workers.decode >= 2
    assert sizing.prediction
    assert not meets(sizing.prediction, PROMISE)
    assert size_pools(DISAGGREGATED, LIKE_CHATS.scaled(0.01), PROMISE, limits, CURRENT).workers == PoolSizes(
        1, 2
    )


def test_limits_that_exclude_each_other_change_nothing() -> None:
    limits = WorkerLimits(max_gpus=1, least=PoolSizes(1, 1))
    sizing = size_pools(DISAGGREGATED, LIKE_CHATS, PROMISE, limits, PoolSizes(4, 4))
    assert sizing.workers == PoolSizes(4, 4)
    assert "the minimums need 2 GPUs, the budget has 1" in sizing.steps[-1].why


def test_arrivals_in_bursts_do_not_make_a_target_one_that_nobody_can_meet() -> None:
    bursts = replace(LIKE_CHATS, burstiness=8.0, dispersions=((1.0, 8.0), (2.0, 8.0)))
    assert "targets" not in [step.stage for step in sized(bursts).steps]


@pytest.mark.parametrize(
    ("slots", "rate_per_s"), [(2, 0.5), (2, 3.0), (4, 0.5), (4, 1.2), (4, 3.0), (8, 3.0)]
)
def test_few_slots_let_requests_wait_and_ask_for_at_most_one_worker_too_many(
    slots: int, rate_per_s: float
) -> None:
    settings = EngineSettings(256, 64, request_slots=slots, batched_tokens=512, context_tokens=4096)
    few, requests = WorkerKind(SMALL_MODEL, settings), arrivals(Shape(65, 0.4, 40, 0.3), rate_per_s, 2000)
    promise = SlaTargets(3000, 200)

    def is_kept(workers: int) -> bool:
        ttfts_ms, itls_ms = decode_times_ms(few, workers, requests, is_remote=False)
        return percentile(ttfts_ms, 95) <= promise.ttft_ms and percentile(itls_ms, 95) <= promise.itl_ms

    service = QueueingModel(few, is_evenly_routed=True)
    workers = sized(demand_of(requests, rate_per_s), promise, service).workers.decode
    assert is_kept(workers)
    assert workers <= 2 or not is_kept(workers - 2)
