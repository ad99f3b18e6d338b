"""A lower bound: the GPU-hours that every schedule takes which meets the SLO.

The problem (see the package's page) is relaxed until its minimum can be added up:

- Workers are divisible, start for nothing, and are there when there is work, but for one worker of each role
  over the whole trace, which constraint and objective ask for.
- Work waits for nothing: no queue, no limit of KV blocks between requests. Each request costs the
  worker-seconds that are the least in any batch:

    prompt:  T(prompt) - T(0), its marginal time, plus T(0) / P, its share of a step's fixed time T(0)
             when the step holds as many prompts as a prefill worker ever does, P (0 for aggregated workers)
    answer:  steps * min over batches b of D(b, b * context) / b, over the batches whose step keeps the ITL
             target; ``context`` is the mean context of the request while it decodes

- Only requests that must be served well within the trace count: the M dearest prompts are left out, as many
  as may miss TTFT, and the 2 M dearest answers, as many as may miss either target. So are requests that could
  be served after the last arrival, where GPU-hours are no longer counted.

Then GPU-hours >= sum over roles of g_r * max(length of the trace, work of role r) / 3600, where aggregated
workers do both kinds of work.

WHERE IT HOLDS

In a real batch contexts differ. That an uneven batch is not cheaper than even ones follows where D(b, kv) is
linear in b and kv (the cost of a token is then an average over the batch), which measured profiles nearly
are. It does not hold for a trace whose prompts share prefixes: b is limited by the KV blocks of b separate
contexts, but requests that share blocks fit into larger, cheaper batches. Such a trace gets no bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynaplan.core.engine.settings import EngineSettings
from dynaplan.core.engine.timing import StepTiming
from dynaplan.domain.lifecycle import Role
from dynaplan.simulator.oracle.trace_arrays import TraceArrays
from dynaplan.simulator.service import ServiceSettings

NO_LOWER_BOUND = "the prompts share prefixes, and shared KV blocks allow larger batches than it assumes"
"""The reason why a trace with prefix hashes has no lower bound."""

CONTEXT_BITS = 8
"""Binary digits of a context, in tokens, that share one cost of a token: contexts are told apart by 256."""


def least_gpu_hours(arrays: TraceArrays, settings: ServiceSettings, percentile: float) -> float:
    """Return the bound in GPU-hours until the last arrival; 0 for an empty trace."""
    total = len(arrays.arrival_s) + arrays.lost
    may_miss = int(total * (1 - percentile / 100) + 1e-9)
    slo, widths = settings.slo, settings.gpus_per_worker
    latest_s = arrays.end_s - slo.ttft_ms / 1000
    count = len(arrays.arrival_s)
    share_s = arrays.fixed_s / settings.concurrent_prefills if Role.PREFILL in widths else 0.0
    prompts = (
        arrays.prefill_s[number] + share_s for number in range(count) if arrays.arrival_s[number] <= latest_s
    )
    prefill_s = _without_dearest(prompts, may_miss)
    costs = _TokenCosts(settings)
    answers = (
        arrays.steps[number] * costs.seconds(arrays.prompt_tokens[number] + arrays.steps[number] // 2)
        for number in range(count)
        if arrays.arrival_s[number] + arrays.steps[number] * slo.itl_ms / 1000 <= latest_s
    )
    decode_s = _without_dearest(answers, 2 * may_miss)
    if Role.PREFILL not in widths:
        return max(arrays.end_s, prefill_s + decode_s) * widths[Role.DECODE] / 3600
    prefill_gpu_s = max(arrays.end_s, prefill_s) * widths[Role.PREFILL]
    return (prefill_gpu_s + max(arrays.end_s, decode_s) * widths[Role.DECODE]) / 3600


def _without_dearest(costs: Iterable[float], spared: int) -> float:
    ordered = sorted(costs)
    return sum(ordered[: max(0, len(ordered) - spared)])


class _TokenCosts:
    """The least worker-seconds of one decoded token, by the context of its request."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._engine: EngineSettings
        self._timing: StepTiming
        self._engine, self._timing = settings.engines[Role.DECODE]
        self._limit_ms = settings.slo.itl_ms
        self._known: dict[int, float] = {}

    def seconds(self, context_tokens: int) -> float:
        """Return the worker-seconds of a token at that mean context."""
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
