"""The prefill pool as a queue: workers that pull, and compute what they hold in one step.

Prompts share the fixed cost of a step, so a pool under pressure batches and does more than one that is not.
While a worker computes one half of what it holds, the other half waits for the next step: that half is the
most a batch counts for. Who finds all workers busy waits for the rest of the step that runs, for the prompts
that share the next one, and, with a chance that grows with the load, for the queue beyond that, whose length
falls off exponentially (Kingman's bound, with two moments).
"""

from __future__ import annotations

import math

from dynaplan.core.sizing.waiting import gamma_tail, probability_of_waiting
from dynaplan.core.sizing.workload import Prompts, WorkerKind

MARGIN = 1.15
"""What the waiting is multiplied by: measured against the engine model, it is seldom underrated then."""

NEGLIGIBLE = 1e-4
"""A chance below which there is no queue to speak of."""

ROUNDS = 12
"""Of the fixed point between batch and load; each halves the error."""


class PrefillWaiting:
    """So many workers under a demand. Times in ms, from a prompt's arrival to the end of its prefill."""

    def __init__(
        self, prompts: Prompts, kind: WorkerKind, workers: int, requests_per_ms: float, burstiness: float
    ) -> None:
        self._prompts = prompts
        self._workers = workers
        self._rate = requests_per_ms
        self._batch = largest_batch(prompts, kind)
        full_ms = prompts.fixed_ms + self._batch * prompts.mean_ms
        self.utilisation = requests_per_ms * full_ms / self._batch / workers
        self.is_overloaded = self.utilisation >= 1.0
        self._waiting = 0.0
        self._near_ms = self._near_variance = self._far = self._far_ms = 0.0
        if requests_per_ms > 0 and not self.is_overloaded:
            self._find_waiting(burstiness)
            self._find_queue(full_ms, burstiness)

    @property
    def mean_ms(self) -> float:
        """The mean."""
        if self.is_overloaded:
            return math.inf
        alone_ms = self._prompts.fixed_ms + self._prompts.mean_ms
        return alone_ms + self._waiting * (self._near_ms + self._far * self._far_ms)

    def chance_over(self, limit_ms: float, extra_ms_per_token: float = 0.0) -> float:
        """The part of the requests that take longer than that, with so much more for each of their tokens."""
        if self.is_overloaded:
            return 1.0
        fixed_ms = self._prompts.fixed_ms
        return sum(
            share * self._chance_of_waiting(limit_ms - fixed_ms - own_ms - tokens * extra_ms_per_token)
            for tokens, own_ms, share in self._prompts.points
        )

    def _chance_of_waiting(self, longer_than_ms: float) -> float:
        if longer_than_ms < 0:
            return 1.0
        if not self._waiting:
            return 0.0
        near = gamma_tail(longer_than_ms, self._near_ms, self._near_variance)
        if self._far < NEGLIGIBLE:
            return self._waiting * near
        far = gamma_tail(longer_than_ms, self._near_ms + self._far_ms, self._near_variance + self._far_ms**2)
        return self._waiting * ((1 - self._far) * near + self._far * far)

    def _find_waiting(self, burstiness: float) -> None:
        """The chance to wait, and the wait for the step that runs and for those who share the next one."""
        prompts, workers, rate = self._prompts, self._workers, self._rate
        batch = arriving = 1.0
        for _ in range(ROUNDS):
            step_ms = prompts.fixed_ms + batch * prompts.mean_ms
            load = rate * step_ms / batch
            waiting = probability_of_waiting(workers, load)
            # Arrivals go to idle workers first: only those count who come while all are busy.
            arriving = rate / workers * step_ms * waiting / min(load / workers, 1.0)
            batch = (batch + min(self._batch, arriving + math.exp(-arriving))) / 2
        variance = batch * prompts.variance_ms
        longer_ms = step_ms + variance / step_ms  # a step as one finds it: long ones are found more often
        mates = min(arriving * longer_ms / step_ms, self._batch - 1)
        bursts = MARGIN * _of_bursts(burstiness, variance / step_ms**2)
        self._waiting = waiting
        self._near_ms = bursts * (longer_ms / 2 + mates * prompts.mean_ms)
        self._near_variance = bursts**2 * (longer_ms**2 / 12 + mates * prompts.square_ms)

    def _find_queue(self, full_ms: float, burstiness: float) -> None:
        """The queue beyond the next batch: how likely there is one, and the mean wait for it."""
        workers, rate, batch = self._workers, self._rate, self._batch
        room_ms = batch / rate - full_ms / workers
        spread = batch * self._prompts.variance_ms / workers**2 + burstiness * batch / rate**2
        mean_ms = spread / room_ms / 2
        self._far = math.exp(-workers * batch / rate / mean_ms) if mean_ms else 0.0
        self._far_ms = MARGIN * mean_ms


def largest_batch(prompts: Prompts, kind: WorkerKind) -> float:
    """How many prompts a worker under pressure computes in one step, on average."""
    by_tokens = kind.settings.batched_tokens / max(prompts.mean_tokens, 1.0)
    return max(1.0, min(kind.concurrent_prefills / 2, by_tokens))


def _of_bursts(burstiness: float, service_variation: float) -> float:
    """How much longer one waits than with Poisson arrivals: Allen and Cunneen's ratio."""
    return (burstiness + service_variation) / (1 + service_variation)
