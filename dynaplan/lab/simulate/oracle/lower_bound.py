"""A lower bound: the GPU-hours that every schedule takes which meets the SLO.

SYMBOLS, beside the package's: c, the context of a request, its prompt and half of its answer, in tokens; L,
the ITL target in ms; K, the KV tokens that one decode worker holds; B, its slots. A step is a decode step.

The problem (see the package's page) is relaxed until its minimum can be added up:

- Workers are divisible, start for nothing, and are there when there is work, but for one worker of each role
  over the whole trace, which constraint and objective ask for.
- Work waits for nothing: neither for a worker nor for KV blocks or slots that other requests hold. A batch is
  limited all the same. Each request costs the worker-seconds that are the least in any batch:

    prompt:  T(prompt) - T(0), its own part of a step, plus T(0) / P: a step holds at most P prompts, and all
             of them pay its fixed part together. Without prefill workers T(0) / P is left out: a step
             that decodes too pays only the part of T(0) above D(1, 0), which may be none
    answer:  steps * min over batch sizes b of D(b, b * c) / b, for b = 1 and for every b that fits the slots
             (b <= B) and the KV (b * c <= K) and keeps the ITL target (D(b, b * c) <= L)

- Only requests that must be served before the last arrival count, as GPU-hours count no further: a prompt
  with arrival + TTFT target <= last arrival, and an answer with arrival + TTFT target + steps * L <= last
  arrival. Each counts wholly or not at all. Meeting its targets, such a request has all this work done by
  then.
- Of these, the M dearest prompts are left out, as many as may miss TTFT, and the 2 M dearest answers, as many
  as may miss either target: whichever requests miss, the others cost no less.

Then GPU-hours >= sum over roles of g_r * max(length of the trace, work of role r) / 3600, where aggregated
workers do both kinds of work.

WHY NO BATCH IS CHEAPER, where D(b, kv) = d0 + d1 b + d2 kv. Let v = d1 + d2 c be a request's own ms of a
step; a step with requests i takes x = d0 + sum of v_i. Share x among them in one of three ways:

    ITL:    v x / (x - d0)     all shares are x together, whatever the others' contexts
    KV:     v + d0 c / K       all shares are at most x, since the sum of the c_i is at most K
    slots:  v + d0 / B         likewise, since at most B decode

The ITL target is one on the mean of an answer's steps: some may be longer. But v x / (x - d0) is convex and
falls in x, so by Jensen's inequality its mean over the answer is at least its value at the mean step, which
is at most L: v L / (L - d0). Mixing long and short steps saves nothing. With b = (L - d0) / v, b = K / c and
b = B, each share is D(b, b c) / b: the formula above, which takes the smallest b, so the largest share.

WHERE IT HOLDS

The prompts' part holds for every T that does not fall with t. The answers' part is proven only as far as
the argument goes:

- D is linear, which fitted profiles are and measured ones nearly; not the mocker's polynomial.
- One of the three limits is the narrowest for all answers. Each way of sharing bounds the sum over all
  answers, but the formula takes the largest share answer by answer. Where short contexts fill the slots and
  long ones the KV, a batch of both may be cheaper: on ``h200-bf16`` with 256 slots, L = 50 and contexts of
  512 and 5888 tokens in equal parts, the bound of the decode work is 6 % too high. Only d0's part is
  concerned.
- v is constant. It grows along an answer, and an answer with its long steps at its end, where v is largest,
  pays less of d0: by 0.3 % when it is half as long as its prompt, by 1/9 at most.
- b may be a fraction. The formula takes whole ones, and is too high by less than d0 / b^2 ms a token.

It does not hold, and none is given, where decode workers compute some prompts of a deployment with prefill
workers (``DisaggregationSettings`` that are conditional or limit the queue, ``prefill_wait_s`` below the TTFT
target; what is given up later is a miss, and no more of these are left out): prefill workers may then have
less work than is counted. With jitter of the step times it holds on average only.

SHARED PREFIXES. A prompt with block hashes, where the engine that computes prompts caches prefixes, counts
T(prompt) - T(cached), with every block cached that any earlier prompt of the trace had: one endless cache of
all workers. A real one is a part of that, whatever the router and the number of workers do, as long as no
prompt is computed before an earlier one on the same worker. Where one is (prompts directed to a worker come
before those of the shared queue, late ones wait with dispatch by deadline), the two may exchange what they
compute: the sum stays where T is linear. Requests that share blocks fit into larger batches than b <= K / c
allows, so that limit is left out, and with it the second way of sharing. A step counts every request's whole
context, shared or not, as the simulator does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynaplan.engines.timing_model.settings import EngineSettings
from dynaplan.engines.timing_model.timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.trace_arrays import TraceArrays
from dynaplan.simulation.service import ANY_QUEUE, ServiceSettings

PREFILLED_LOCALLY = "decode workers compute some of the prompts, which it counts for the prefill workers"
"""The reason why a service whose disaggregation is conditional, or limits the queue, has no lower bound."""


def why_no_lower_bound(settings: ServiceSettings) -> str:
    """Return the reason why the bound does not hold for this service; empty when it does."""
    placing = settings.disaggregation
    is_limited = placing.is_conditional or placing.most_queued < ANY_QUEUE
    wait_s = settings.prefill_wait_s
    gives_up_early = wait_s is not None and 1000 * wait_s < settings.slo.ttft_ms
    return PREFILLED_LOCALLY if placing.is_on and (is_limited or gives_up_early) else ""


CONTEXT_BITS = 8
"""Binary digits of a context, in tokens, that share one cost of a token: contexts are rounded down to
multiples of 256, where a token costs no more as long as D rises with kv, so the bound stays one."""


def least_gpu_hours(arrays: TraceArrays, settings: ServiceSettings, percentile: float) -> float:
    """Return the bound in GPU-hours until the last arrival; 0 for an empty trace."""
    total = len(arrays.arrival_s) + arrays.lost
    may_miss = int(total * (1 - percentile / 100) + 1e-9)
    slo, widths = settings.slo, settings.gpus_per_worker
    latest_s = arrays.end_s - slo.ttft_ms / 1000
    count = len(arrays.arrival_s)
    share_s = arrays.fixed_s / settings.concurrent_prefills if Role.PREFILL in widths else 0.0
    prompts = (
        arrays.least_prefill_s[number] + share_s
        for number in range(count)
        if arrays.arrival_s[number] <= latest_s
    )
    prefill_s = _without_dearest(prompts, may_miss)
    costs = _TokenCosts(settings, are_blocks_shared=arrays.are_prefixes_shared)
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
    """The least worker-seconds of one decoded token, by the context of its request.

    Where not even a batch of 1 keeps the ITL target, a token costs what it does in a batch of 1. Such
    requests miss anyway, and the sum without the 2 M dearest is at most the sum without the requests that
    miss.
    """

    def __init__(self, settings: ServiceSettings, *, are_blocks_shared: bool) -> None:
        self._are_blocks_shared = are_blocks_shared
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
        most = self._engine.request_slots
        if not self._are_blocks_shared:
            most = min(most, self._engine.total_blocks * self._engine.block_tokens // context_tokens)
        least_ms: Any = self._timing.decode_ms(1, context_tokens)
        for batch in range(2, most + 1):
            step_ms = self._timing.decode_ms(batch, batch * context_tokens)
            if step_ms <= self._limit_ms:
                least_ms = min(least_ms, step_ms / batch)
        return float(least_ms) / 1000
