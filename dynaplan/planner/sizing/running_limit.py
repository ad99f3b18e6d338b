"""How many requests may run at once on a worker, and how long another one may wait in front of it.

A worker decodes whatever it is given, all of it in each step, so one request too many makes every stream
slow. Held back in the frontend for a moment it costs only its own TTFT, where that has room.

**The most.** The largest n for which every number up to it keeps step(n) <= ITL target:

    step(n) = D(n, n ctx + K sqrt(n Var(ctx))) + n (own + f) / S

D is a step that decodes, ctx the context of a request that is being decoded, own and f what a prompt adds to
a step, S the decode steps of an answer (``queueing/workload.py``): of n requests on an aggregated worker
n / S begin in each step. Where prefill workers compute the prompts there is no second term, but requests hold
their place while they are there: rate / workers x the mean time of a prefill are added to n. What is learnt
is careful beyond the batches that were seen, so the limit rises as larger ones are seen.

**The room.** TTFT target - first(n), not below 0, with the time of a request that has a place:

    first(n) = step(n) + a prompt's own steps            aggregated
    first(n) = prefill, wait included + transfer + 2.5 step(n)     with prefill workers, at the present demand

at the promised percentile of the prompts, or of the prefills.

**The wait.** A full worker ends n / (S step(n) + mean first) requests a second. A request is held back only
while the ends to be expected within the room give a place to all that wait and to it
(``routing/hold_back.py``): where they do not, waiting would break the TTFT and keep no ITL, and the
limit yields. So beyond what a deployment can bear the limit does nothing, and the planner adds workers.

**Where it is wrong.** Ends are not even: some wait longer, at most for the room, and then go to a worker all
the same. n counts requests of mean length. An ITL is a mean over an answer, so short answers swing more than
step(n) says. The backtests know nothing of the limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, takewhile

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.planner.sizing.queueing.queueing_model import (
    FIRST_TOKEN_STEPS,
    TRANSFER_MS,
    TRANSFER_MS_PER_TOKEN,
    SteadyState,
    percentile_ms,
)

KV_DEVIATIONS = 1.64
"""K: 95 of 100 moments have no more context in their batch."""


@dataclass(frozen=True)
class FullWorker:
    """A worker of the service on which ``running`` requests of the demand run all the time; times in ms."""

    state: SteadyState
    running: int

    @property
    def step_ms(self) -> float:
        kind, answers, running = self.state.service.decode, self.state.answers, self.running
        variance = max(0.0, answers.context_square - answers.context_tokens**2)
        kv_tokens = running * answers.context_tokens + KV_DEVIATIONS * math.sqrt(running * variance)
        decode_ms = kind.decode_ms(running, kv_tokens)
        if not self.state.is_aggregated:
            return decode_ms
        begins = running / max(1.0, answers.mean_steps)
        return decode_ms + begins * (self.state.prompts.mean_ms + self._begin_ms)

    @property
    def _begin_ms(self) -> float:
        """f of the module: by how many ms a step is longer that begins prompts."""
        return max(0.0, self.state.prompts.fixed_ms - self.state.service.decode.decode_ms(1, 0.0))

    def first_ms(self, workers: PoolSizes, percent: float) -> float:
        """Return the TTFT in ms that ``percent`` of the requests do not exceed once they have a place."""
        state = self.state
        if state.is_aggregated:
            return self.step_ms + self._own_ms(percent)
        prefill = state.prefill_waiting(max(1, workers.prefill))
        if prefill.is_overloaded:
            return math.inf
        prefill_ms = percentile_ms(
            lambda ms: prefill.chance_over(ms, TRANSFER_MS_PER_TOKEN), percent, prefill.mean_ms
        )
        return prefill_ms + TRANSFER_MS + FIRST_TOKEN_STEPS * self.step_ms

    def mean_first_ms(self, workers: PoolSizes) -> float:
        """Return the mean time for which a request holds its place before it decodes."""
        state = self.state
        if state.is_aggregated:
            return self.step_ms + self._begin_ms + state.prompts.mean_ms
        return state.prefill_waiting(max(1, workers.prefill)).mean_ms

    def _own_ms(self, percent: float) -> float:
        """Return the ms of a prompt's steps that ``percent`` of the prompts do not exceed."""
        points = self.state.prompts.points
        shares = accumulate(share for _, _, share in points)
        index = next((number for number, share in enumerate(shares) if share >= percent / 100), -1)
        tokens, own_ms, _ = points[index]
        budget = max(1, self.state.service.decode.settings.batched_tokens - self.running)
        return math.ceil(tokens / budget) * self.step_ms + self._begin_ms + own_ms


def most_running(state: SteadyState, itl_ms: float) -> int:
    """Return how many requests may run at once on a worker within ``itl_ms``: from 0 to its slots."""
    numbers = range(1, state.service.decode.settings.request_slots + 1)
    return sum(1 for _ in takewhile(lambda number: FullWorker(state, number).step_ms <= itl_ms, numbers))


def limit_of(state: SteadyState, most: int, targets: SlaTargets, workers: PoolSizes) -> RunningLimit:
    """Return the limit for a worker on which ``most`` requests decode, with the wait for a place.

    Requests whose prompt is computed elsewhere hold a place too, and are added.
    """
    full = FullWorker(state, most)
    held_ms = full.mean_first_ms(workers)
    room_ms = max(0.0, targets.ttft_ms - full.first_ms(workers, targets.ttft_percentile))
    if not state.is_aggregated and math.isfinite(held_ms):
        most += math.ceil(state.demand.requests_per_s / max(1, workers.decode) * held_ms / 1000)
    place_s = (state.answers.mean_steps * full.step_ms + held_ms) / 1000
    return RunningLimit(most, room_ms / 1000, most / max(place_s, 1e-3))
