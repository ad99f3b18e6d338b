"""Small engine models for the tests."""

from __future__ import annotations

from typing import Any

from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings, StepResult
from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.engines.timing_model.step_timing import StepTiming

BLOCK_TOKENS = 4


def round_timing() -> StepTiming:
    """Prefill 10 ms + 1 ms per token; decode 2 ms + 1 ms per sequence."""
    return StepTiming(lambda tokens: 10.0 + tokens, lambda decodes, _kv: 2.0 + decodes)


def small_model(**settings: Any) -> EngineModel:
    """100 blocks of 4 tokens, a budget of 32 tokens and 8 requests, unless told otherwise."""
    defaults = {
        "total_blocks": 100,
        "block_tokens": BLOCK_TOKENS,
        "context_tokens": 400,
        "batched_tokens": 32,
        "request_slots": 8,
    }
    return EngineModel(EngineSettings(**{**defaults, **settings}), round_timing())


def request(name: str, prompt: int | list[int], answer: int, **options: Any) -> EngineRequest:
    """A request with so many prompt tokens that share nothing, or with these prompt tokens."""
    if isinstance(prompt, int):
        return EngineRequest(name, prompt, answer, **options)
    return EngineRequest(name, len(prompt), answer, block_hashes(prompt, BLOCK_TOKENS), **options)


def run(model: EngineModel, horizon_s: float = 0.0) -> list[StepResult]:
    """Step until idle; the results."""
    results = []
    while not model.is_idle:
        results.append(model.step(horizon_s))
        assert not results[-1].is_empty, "the model is stuck"
    return results


def names(requests: Any) -> list[str]:
    """Their ids."""
    return [each.request_id for each in requests]
