"""Up to which length a decode worker computes a prompt itself, by the load of both pools."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.planner.model import Demand
from dynaplan.planner.sizing.local_prefill import LocalPrefill, longest_local
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState
from dynaplan.planner.sizing.queueing.workload import WorkerKind

TIMING = StepTiming(lambda tokens: 5.0 + 0.1 * tokens, lambda decodes, kv: 5.0 + 0.1 * decodes)
KIND = WorkerKind(TIMING, EngineSettings(total_blocks=10_000, request_slots=64))
PROMPTS = Lengths((100.0, 300.0, 1000.0), (40.0, 30.0, 20.0, 10.0))
WORKERS = PoolSizes(1, 1)


def longest(rate: float, itl_ms: float = 20.0, workers: PoolSizes = WORKERS) -> LocalPrefill:
    demand = Demand(rate, PROMPTS, Lengths.fixed(100))
    return longest_local(SteadyState(QueueingModel(KIND, KIND), demand), SlaTargets(1000, itl_ms), workers)


def test_what_is_local_comes_no_later_and_keeps_the_itl() -> None:
    found = longest(4.0)
    assert 0 < found.most_tokens < 2000
    assert found.local_ms <= found.remote_ms
    assert found.most_running >= 1


def test_a_tight_itl_leaves_decode_workers_no_prompt() -> None:
    assert longest(4.0, itl_ms=5.5) == LocalPrefill()


def test_where_prompts_wait_for_prefill_workers_decode_workers_compute_longer_ones() -> None:
    waiting = longest(7.0, itl_ms=100.0, workers=PoolSizes(1, 4))
    assert waiting.most_tokens > longest(7.0, itl_ms=100.0, workers=PoolSizes(8, 4)).most_tokens


def test_overloaded_decode_workers_compute_nothing() -> None:
    assert longest(1000.0) == LocalPrefill()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 20), st.floats(6, 60), st.integers(1, 4))
def test_more_decode_workers_and_a_wider_itl_never_shorten_it_while_it_binds(
    rate: float, itl_ms: float, decode: int
) -> None:
    found = longest(rate, itl_ms, PoolSizes(1, decode))
    assert found == LocalPrefill() or found.local_ms <= found.remote_ms
    assert longest(rate, 2 * itl_ms, PoolSizes(1, decode)).most_tokens >= found.most_tokens
