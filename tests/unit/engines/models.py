"""Small engine models for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
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


class Step(NamedTuple):
    """What one call of ``EngineModel.step`` did; requests by their ids."""

    duration_s: float
    steps: int
    tokens: int
    first_token_requests: list[str]
    finished: list[str]
    preemptions: int


def step(model: EngineModel, horizon_s: float = 0.0) -> Step:
    """Step a model that is not stuck."""
    tokens, preemptions = model.totals.generated_tokens, model.totals.preemptions
    duration_s = model.step(horizon_s)
    assert duration_s is not None, "the model is stuck"
    first, finished = _ids(model.first_token_requests), _ids(model.finished)
    tokens, preemptions = model.totals.generated_tokens - tokens, model.totals.preemptions - preemptions
    return Step(duration_s, model.steps_done, tokens, first, finished, preemptions)


def run(model: EngineModel, horizon_s: float = 0.0) -> list[Step]:
    """Step until idle; what each step did."""
    steps = []
    while not model.is_idle:
        steps.append(step(model, horizon_s))
    return steps


def _ids(requests: Sequence[EngineRequest]) -> list[str]:
    return [each.request_id for each in requests]
