"""The wait for a prefill worker: a multi-server queue whose servers compute several prompts in one step.

**Model.** Prompts arrive at rate r (per ms) and wait in one first-come-first-served queue. Each of c alike
workers pulls up to K prompts (``max-concurrent-prefills``) and computes all that it holds when a step
begins in that step. A step with n prompts takes F + own_1 + ... + own_n ms (F fixed, own per prompt,
moments m, ``workload.py``). The number of arrivals has variance over mean b (``burstiness``; 1 is Poisson).

**Batches.** Prompts in one step share F, so a pool under pressure does more than an idle one. While a
worker computes half of what it holds, the other half waits for the next step, so the largest batch that
counts is

    B = min(K / 2, step tokens / mean prompt tokens), at least 1
    utilisation = r (F + B m) / (B c),  overloaded from 1 on

At lower load the batch n follows from a fixed point: step = F + n m; the offered load is a = r step / n
workers; the chance to wait is P = ErlangC(c, a); during one step of a worker g = (r/c) step P / (a/c)
prompts arrive for it while all workers are busy; the next step takes n = min(B, E[max(1, Poisson(g))]) with
E[max(1, Poisson(g))] = g + exp(-g).

**The wait** of a prompt, then, is 0 with chance 1 - P. Else it is, with chance 1 - Q, only the near part:

    near = rest of the step that runs + prompts that share the next step
    mean: L/2 + M m     variance: L^2/12 + M E[own^2]

L = E[step^2] / E[step] is the length of a step as an arrival finds it (inspection paradox), its rest is
uniform on it, and M = min(g L / step, B - 1) is the mean number of prompts that share the next step
(compound Poisson). Bursts stretch the near part by Allen and Cunneen's ratio (b + v) / (1 + v), v being the
squared coefficient of variation of a step (Allen, Probability, Statistics and Queueing Theory, 1990; Whitt
1993).

With chance Q a queue stands beyond the next batches, and the far part comes on top. The pool is taken for
one fast server of batches: B prompts arrive in B/r ms and are computed in (F + B m)/c ms. Kingman's
exponential bound (1964, 1970) with two moments gives the wait a mean of

    W = (B Var(own) / c^2 + b B / r^2) / (2 (B/r - (F + B m)/c))   and   Q = exp(-(c B / r) / W)

Q is the chance to exceed c B / r, the time in which one full batch per worker arrives. Both parts have
gamma tails.

**TTFT share.** ``chance_over(limit)`` = sum over prompt lengths of share x P(wait > limit - F -
own(length)): the percentile comes from the distribution of lengths and of the wait together.

**Where it is wrong.** It is an approximation throughout: measured against engine models in virtual time the
95th percentile is right to 0.88 to 1.17 times (``python -m tests.bench sla``). Above some 90 % utilisation
it says up to three times the simulated wait. Prompts and arrivals are taken to be independent of each
other.
"""

from __future__ import annotations

import math

from dynaplan.core.sizing.waiting import gamma_tail, probability_of_waiting
from dynaplan.core.sizing.workload import Prompts, WorkerKind

MARGIN = 1.15
"""Factor on every wait. Measured: with it the wait of engine models is seldom underrated."""

NEGLIGIBLE = 1e-4
"""Chance of a queue beyond the next batches below which that queue is not computed."""

ROUNDS = 12
"""Rounds of the fixed point between batch and load; each halves the error, 12 leave 1 in 4000."""


class PrefillWaiting:
    """A pool of prefill workers in the steady state: times from a prompt's arrival to the end of its prefill.

    ``utilisation`` is the part of the pool's capacity, at its largest batch, that is in use;
    ``is_overloaded`` says that prompts come faster than that.
    """

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
            self._find_near_wait(burstiness)
            self._find_far_wait(full_ms, burstiness)

    @property
    def mean_ms(self) -> float:
        """Mean time from arrival to the end of the prefill, ms; infinite when overloaded."""
        if self.is_overloaded:
            return math.inf
        alone_ms = self._prompts.fixed_ms + self._prompts.mean_ms
        return alone_ms + self._waiting * (self._near_ms + self._far * self._far_ms)

    def chance_over(self, limit_ms: float, extra_ms_per_token: float = 0.0) -> float:
        """Return the part of the requests that take longer than ``limit_ms``, 0 to 1.

        ``extra_ms_per_token`` is added for each token of a prompt: the transfer of its KV entries.
        """
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

    def _find_near_wait(self, burstiness: float) -> None:
        """Set the chance to wait P, and mean and variance of the near part."""
        prompts, workers, rate = self._prompts, self._workers, self._rate
        batch = arriving = 1.0
        for _ in range(ROUNDS):
            step_ms = prompts.fixed_ms + batch * prompts.mean_ms
            load = rate * step_ms / batch
            waiting = probability_of_waiting(workers, load)
            # Arrivals go to idle workers first: a batch grows only while all workers are busy.
            arriving = rate / workers * step_ms * waiting / min(load / workers, 1.0)
            batch = (batch + min(self._batch, arriving + math.exp(-arriving))) / 2
        variance = batch * prompts.variance_ms
        found_ms = step_ms + variance / step_ms
        mates = min(arriving * found_ms / step_ms, self._batch - 1)
        stretch = MARGIN * _burst_ratio(burstiness, variance / step_ms**2)
        self._waiting = waiting
        self._near_ms = stretch * (found_ms / 2 + mates * prompts.mean_ms)
        self._near_variance = stretch**2 * (found_ms**2 / 12 + mates * prompts.square_ms)

    def _find_far_wait(self, full_ms: float, burstiness: float) -> None:
        """Set the chance Q of a queue beyond the next batches, and the mean wait W for it."""
        workers, rate, batch = self._workers, self._rate, self._batch
        room_ms = batch / rate - full_ms / workers
        spread = batch * self._prompts.variance_ms / workers**2 + burstiness * batch / rate**2
        mean_ms = spread / room_ms / 2
        self._far = math.exp(-workers * batch / rate / mean_ms) if mean_ms else 0.0
        self._far_ms = MARGIN * mean_ms


def largest_batch(prompts: Prompts, kind: WorkerKind) -> float:
    """Return B, the mean number of prompts in one step of a worker under pressure."""
    by_tokens = kind.settings.batched_tokens / max(prompts.mean_tokens, 1.0)
    return max(1.0, min(kind.concurrent_prefills / 2, by_tokens))


def _burst_ratio(burstiness: float, service_variation: float) -> float:
    """Return how much longer a wait is than with Poisson arrivals (Allen and Cunneen)."""
    return (burstiness + service_variation) / (1 + service_variation)
