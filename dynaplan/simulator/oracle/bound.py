"""What no schedule can go below: the work of those who must meet their targets, done at its cheapest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynaplan.core.engine.settings import EngineSettings
from dynaplan.core.engine.timing import StepTiming
from dynaplan.domain.lifecycle import Role
from dynaplan.simulator.oracle.requests import Requests
from dynaplan.simulator.service import ServiceSettings

NO_LOWER_BOUND = "the prompts share prefixes, and the least that caches leave to compute is unknown"
"""Why a trace with prefix hashes has no lower bound."""

CONTEXT_BITS = 8
"""Decode work is looked up for contexts of every 256 tokens."""


def least_gpu_hours(requests: Requests, settings: ServiceSettings, percentile: float) -> float:
    """GPU hours until the last arrival that every schedule needs which keeps the SLO; 0 for an empty trace.

    At least one worker of each role is there all the time. Prompts are computed at their marginal cost, and a
    prefill worker shares the fixed part of its steps among as many as it ever holds (an aggregated one pays
    nothing of it); tokens are decoded in the largest batch that keeps the ITL target,
    all contexts in it alike. The dearest requests that may miss are left out, and those that could still be
    served after the end. Starts, and that workers are whole, are left out too. That a mixed or uneven batch
    is not cheaper holds where a step's time is linear in requests and KV, which measured profiles nearly are.
    """
    total = len(requests.arrival_s) + requests.lost
    spared = int(total * (1 - percentile / 100) + 1e-9)
    slo, widths = settings.slo, settings.gpus_per_worker
    latest_s = requests.end_s - slo.ttft_ms / 1000
    count = len(requests.arrival_s)
    share_s = requests.fixed_s / settings.concurrent_prefills if Role.PREFILL in widths else 0.0
    prompts = (
        requests.prefill_s[each] + share_s for each in range(count) if requests.arrival_s[each] <= latest_s
    )
    prefill_s = _without_dearest(prompts, spared)
    costs = _TokenCosts(settings)
    answers = (
        requests.steps[each] * costs.of(requests.prompt_tokens[each] + requests.steps[each] // 2)
        for each in range(count)
        if requests.arrival_s[each] + requests.steps[each] * slo.itl_ms / 1000 <= latest_s
    )
    decode_s = _without_dearest(answers, 2 * spared)
    if Role.PREFILL not in widths:
        return max(requests.end_s, prefill_s + decode_s) * widths[Role.DECODE] / 3600
    prefill_gpu_s = max(requests.end_s, prefill_s) * widths[Role.PREFILL]
    return (prefill_gpu_s + max(requests.end_s, decode_s) * widths[Role.DECODE]) / 3600


def _without_dearest(costs: Iterable[float], spared: int) -> float:
    ordered = sorted(costs)
    return sum(ordered[: max(0, len(ordered) - spared)])


class _TokenCosts:
    """The seconds of a worker that a token costs at least, by its context."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._engine: EngineSettings
        self._timing: StepTiming
        self._engine, self._timing = settings.engines[Role.DECODE]
        self._limit_ms = settings.slo.itl_ms
        self._known: dict[int, float] = {}

    def of(self, context_tokens: int) -> float:
        """That of a request whose context is so long on average."""
        bucket = context_tokens >> CONTEXT_BITS
        if bucket not in self._known:
            self._known[bucket] = self._least(max(1, bucket << CONTEXT_BITS))
        return self._known[bucket]

    def _least(self, context_tokens: int) -> float:
        kv_tokens = self._engine.total_blocks * self._engine.block_tokens
        most = max(1, min(self._engine.request_slots, kv_tokens // context_tokens))
        least_ms: Any = self._timing.decode_ms(1, context_tokens)
        for batch in range(2, most + 1):
            step_ms = self._timing.decode_ms(batch, batch * context_tokens)
            if step_ms <= self._limit_ms:
                least_ms = min(least_ms, step_ms / batch)
        return float(least_ms) / 1000
