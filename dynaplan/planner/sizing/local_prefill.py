"""Up to which length a decode worker computes a prompt itself, where prefill workers could.

The router asks for each prompt (``routing/disaggregation.py``): those with no more tokens to compute than the
limit L stay with the decode worker. Here L is found for the present load, as the longest for which

1. the decode workers keep the ITL target: each is an aggregated worker (``queueing/decode_model.py``) to
   which the prompts up to L cost their time, a start of a prompt included, and all others nothing;
2. a prompt of L tokens has its first token there no later than through a prefill worker:

    local  = long wait for the rest of a step and the prompts in it + a decode step for each chunk + own
    remote = wait for a prefill worker + own + transfer + 2.5 decode steps

   the wait being that of the prompts that are longer than L, which alone are left for the prefill workers.

With L the decode workers become slower and the prefill workers quicker, so both hold up to one length and not
beyond; it is searched among the lengths that stand for the measured ones (``workload.py``). Where the prefill
workers are overloaded the first alone counts: what the decode workers can bear is taken off them. A prompt is
taken to cost a decode worker what it costs a prefill worker. The sizes of the pools count every prompt for
the prefill workers all the same: that errs on the safe side.

A load that rises before the next decision is seen by what runs: on a worker with more requests than the batch
of this load and two of its deviations no prompt is computed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.sizing.queueing.decode_model import DecodeBatch
from dynaplan.planner.sizing.queueing.prefill_model import PrefillWaiting
from dynaplan.planner.sizing.queueing.queueing_model import (
    FIRST_TOKEN_STEPS,
    TRANSFER_MS,
    TRANSFER_MS_PER_TOKEN,
    SteadyState,
)
from dynaplan.planner.sizing.queueing.workload import Prompts

DEVIATIONS = 2.0
"""Usual deviations of a batch, beyond which a worker has more requests than this load explains."""

WAIT_DEVIATIONS = 1.0
"""Deviations of the wait with which a local prompt is compared: what it wins in the mean is not to be lost
among the late ones, of which the promise is."""

MIN_SHARE = 1e-9


@dataclass(frozen=True)
class LocalPrefill:
    """The longest prompt that decode workers compute themselves, and its TTFTs in ms, there and remote.

    A worker does so while no more than ``most_running`` requests run on it. 0 tokens: no prompt is local.
    """

    most_tokens: int = 0
    most_running: int = 0
    local_ms: float = 0.0
    remote_ms: float = 0.0


def longest_local(state: SteadyState, targets: SlaTargets, workers: PoolSizes) -> LocalPrefill:
    """Return the longest prompt that the decode workers of a disaggregated service compute themselves."""
    points = state.prompts.points

    def is_too_long(index: int) -> bool:
        return not _is_better_local(state, index, targets, workers)

    number = bisect_left(range(len(points)), True, key=is_too_long)
    return _times(state, number - 1, workers)[0] if number else LocalPrefill()


def _is_better_local(state: SteadyState, index: int, targets: SlaTargets, workers: PoolSizes) -> bool:
    times, batch = _times(state, index, workers)
    if batch.overload or batch.chance_of_itl_over(targets.itl_ms) > targets.itl_rest:
        return False
    return times.local_ms <= times.remote_ms


def _times(state: SteadyState, index: int, workers: PoolSizes) -> tuple[LocalPrefill, DecodeBatch]:
    """Return the limits and TTFTs if prompt ``index`` is the longest local one, and a decode worker then."""
    tokens, own_ms, _ = state.prompts.points[index]
    batch = _decode_batch(state, index, max(1, workers.decode))
    remote_ms = _remote_ms(state, index, max(1, workers.prefill), FIRST_TOKEN_STEPS * batch.step_ms)
    local_ms = batch.ttft_of(tokens, own_ms + _begin_ms(state), WAIT_DEVIATIONS)
    usual = batch.batch + DEVIATIONS * math.sqrt(batch.batch)
    return LocalPrefill(math.ceil(tokens), math.ceil(usual) + 1, local_ms, remote_ms), batch


def _begin_ms(state: SteadyState) -> float:
    """Return by how many ms a step that decodes is longer when a prompt begins in it."""
    return max(0.0, state.prompts.fixed_ms - state.service.decode.decode_ms(1, 0.0))


def _decode_batch(state: SteadyState, index: int, workers: int) -> DecodeBatch:
    """Return a decode worker that computes the prompts up to ``index`` of the points."""
    decode, demand = state.service.decode, state.demand
    begin_ms = _begin_ms(state)
    local = _costing(
        state.prompts,
        [
            (tokens, own_ms + begin_ms, share) if number <= index else (0.0, 0.0, share)
            for number, (tokens, own_ms, share) in enumerate(state.prompts.points)
        ],
        fixed_ms=0.0,  # a prompt that is computed elsewhere begins nothing here
    )
    burstiness = demand.burstiness / (workers if state.service.is_evenly_routed else 1)
    return DecodeBatch(state.answers, local, decode, demand.requests_per_s / 1000 / workers, burstiness)


def _remote_ms(state: SteadyState, index: int, workers: int, decode_ms: float) -> float:
    """Return the mean TTFT of prompt ``index`` by a prefill worker, if those get the longer prompts only."""
    points, prefill = state.prompts.points, state.service.prefill
    assert prefill
    tokens, own_ms, _ = points[index]
    rest = points[index + 1 :]
    left = sum(share for _, _, share in rest)
    alone_ms = state.prompts.fixed_ms + own_ms
    wait_ms = 0.0
    if left > MIN_SHARE:
        longer = [(length, ms, share / left) for length, ms, share in rest]
        prompts = _costing(state.prompts, longer, state.prompts.fixed_ms)
        rate = state.demand.requests_per_s / 1000 * left
        waiting = PrefillWaiting(prompts, prefill, workers, rate, state.demand.burstiness)
        wait_ms = waiting.mean_ms - prompts.fixed_ms - prompts.mean_ms
    return alone_ms + wait_ms + TRANSFER_MS + tokens * TRANSFER_MS_PER_TOKEN + decode_ms


def _costing(prompts: Prompts, points: list[tuple[float, float, float]], fixed_ms: float) -> Prompts:
    """Return prompts with these points (tokens, ms, share) and this cost of a step."""
    return replace(
        prompts,
        points=tuple(points),
        fixed_ms=fixed_ms,
        mean_tokens=sum(tokens * share for tokens, _, share in points),
        mean_ms=sum(ms * share for _, ms, share in points),
        square_ms=sum(ms**2 * share for _, ms, share in points),
        cube_ms=sum(ms**3 * share for _, ms, share in points),
    )
