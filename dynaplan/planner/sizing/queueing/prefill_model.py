"""The wait for a prefill worker: a multi-server queue whose servers compute several prompts in one step.

**Symbols** (times in ms)

    r      prompts that arrive per ms, first come, first served, in one queue for the pool
    b      variance over mean of the number of arrivals (``queueing_model.py``); 1 is Poisson
    c      workers, all alike
    K      prompts that a worker holds at once (option ``max-concurrent-prefills``)
    F, own fixed cost of a step, and what a prompt adds to it (``workload.py``)
    m      mean of own
    n, B   mean number of prompts in a step, and the largest that counts
    step   mean time of a step, F + n m
    a      offered load, r step / n, in workers
    C      chance that a prompt waits, ErlangC(c, a) (``waiting.py``)
    g      mean number of prompts that come to a busy worker during one of its steps
    found  mean length of the step that an arrival finds running
    M      mean number of prompts that a waiting prompt shares the next step with
    v      squared coefficient of variation of a step, n Var(own) / step^2
    W, Q   mean wait, and chance of a queue, beyond the next batches

**Batches.** A step computes all prompts that its worker holds when it begins: F + own_1 + ... + own_n.
Sharing F, a pool under pressure does more than an idle one. A worker under pressure always holds K prompts;
the ones that a step does not compute are the next step's, so two successive steps have K together, and

    B = min(K / 2, token limit of a step / mean prompt tokens), at least 1
    utilisation = r (F + B m) / (B c),  overloaded from 1 on

The limit is the option ``max-num-batched-tokens``. A prompt longer than it costs its own all the same:
chunks add nothing (``engines/timing_model/step_timing.py``). Engine models fed without pause compute c B
/ (F + B m) prompts per ms to 0.2 % (K of 4 and 16, prompts of 300 and 1000 tokens, c = 1).

At lower load n solves a fixed point. A worker that computes finds all the others busy too with chance
C / (a / c), for a / c of the workers compute; only then do prompts come to it rather than to an idle one:

    g = (r / c) step C / (a / c) = n C,  n a / c where a exceeds c
    n = min(B, E[max(1, Poisson(g))]) = min(B, g + exp(-g))

It is solved from n = 1 on, each round going half of the way. That it is unique is not proven.

**The wait** of a prompt exceeds t >= 0 with the chance

    C ((1 - Q) G(t; near) + Q G(t; near + far)),  mean C (mean of near + Q mean of far)

G being the tail of one gamma distribution that has the summed mean and the summed variance of its parts:

    near   mean k (found / 2 + M m)    variance k^2 (found^2 / 12 + M E[own^2])
    far    mean MARGIN W               variance (MARGIN W)^2, as of an exponential time
    k = MARGIN (b + v) / (1 + v)       MARGIN on mean and deviation of both parts, not on C and Q

*Near* is the rest of the step that runs, and the prompts that share the next one. found = E[step^2] /
E[step] = step + n Var(own) / step (inspection paradox), its rest is uniform on it, and M = min(g found /
step, B - 1) (compound Poisson). (b + v) / (1 + v) is Allen and Cunneen's ratio for bursts, Poisson being 1.

*Far* is a queue beyond the next batches. The pool is taken for one fast server of batches: B prompts
arrive in B / r ms, with variance b' B / r^2, and are computed in (F + B m) / c ms, with variance B Var(own)
/ c^2. In heavy traffic the wait of such a queue is exponential with Kingman's mean

    W = (B Var(own) / c^2 + b' B / r^2) / (2 (B / r - (F + B m) / c))   and   Q = exp(-(c B / r) / W)
    b' = 1 + (b - 1) utilisation^2

b', because Kingman's W is a bound, reached in heavy traffic: what bursts add to the work that comes in B / r
has the variance (b - 1) B ((F + B m) / (c B))^2, the part utilisation^2 of theirs in the time of arrivals.
c B / r is the time in which one full batch per worker arrives. The result bounds the wait of every prompt;
here it is used for prompts that wait (weight C Q, not Q), which C near 1 makes nearly the same.

**Bursts.** The wait is also no shorter than what a burst alone leaves: those of a window of t ms that ends
with the arrival take longer than t and the wait,

    chance(wait > w) = max over t of chance(N(t) > (t + w) c B / (F + B m))
    N(t) has mean r t + I and variance I (r t + I)

I = I(t) is the index of dispersion at that scale (``planner/forecasting/arrivals.py``), and N(t) the number
of arrivals in a window as an arrival finds it, itself included: a window that holds more of them is found by
more. A gamma distribution of mean r t and variance r t I, so biased by size, is one of these moments again.
The larger of this chance and of the one above counts. It is used where b > 1.

Against prompts in virtual time (batches every 3 s, at any time, Poisson ones gathered to 3 s, and Poisson; 2
to 16 requests/s of 1000 and 3000 tokens) the fewest workers with 5 % over 450 ms were wrong for 16 of 40
loads with b at one scale and Kingman's W, 10 times too many, and for 10 with both changes, 2 times too many.

**Percentile.** ``chance_over(limit)`` = sum over prompt lengths of share x chance(wait > limit - F - own -
transfer of its tokens): it comes from the lengths and from the wait together.

**Where it is wrong.** It is an approximation throughout: measured against engine models in virtual time the
95th percentile is right to 0.88 to 1.17 times (``python -m tests.bench sla``). Above some 90 % utilisation
it says up to three times the simulated wait. Large batches that come at once and at any time are underrated:
counts by pull cannot tell whether they come at once. Prompts and arrivals are taken to be independent of
each other.

**Sources.** Allen, Probability, Statistics and Queueing Theory, 1990 (the ratio); Whitt, Approximations for
the GI/G/m queue, 1993 (its use for several servers); Kingman, On queues in heavy traffic, 1962 (W), and
Inequalities in the theory of queues, 1970 (the exponential bound); Kleinrock, Queueing Systems I, 1975,
section 5.2 (inspection paradox). B, g, M and the mixture are this project's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynaplan.planner.sizing.queueing.waiting import gamma_tail, probability_of_waiting
from dynaplan.planner.sizing.queueing.workload import Prompts, WorkerKind

PREFILL_WAIT_MARGIN = 1.15
"""Factor on mean and deviation of the near and of the far wait. Too few workers break a promise and one too
many costs a GPU, so the model is to err upwards. Measured on 48 pools (``tests.bench sla``: two profiles,
three shapes, 1 and 3 workers, 30 to 85 % load), predicted over simulated 95th percentile of the prefill's
time: 0.91 to 1.32, mean 1.12, and 12 % of the pools underrated. With 1 that is 0.80 to 1.17, mean 1.02, 35 %;
with 1.3 it is 1.01 to 1.47, mean 1.21, none."""

NEGLIGIBLE = 1e-4
"""Chance Q below which it counts as 0."""

BATCH_ITERATIONS = 12
"""Rounds of the fixed point of the batch n. Each halves the distance to it, so twelve leave 1/4096 of it;
on the 48 pools of ``PREFILL_WAIT_MARGIN`` 24 and 400 rounds predict the same to two digits, and 3 differ by
0.02 at most. Where C is near 1 the point is nearly neutral, n = n + exp(-n), and the rounds end too early:
the mean time is then right to 1 % with K = 4, but 0.9 times that of the solution with K = 16 at 90 %
utilisation, and 0.7 times at 97 % (measured against 400 rounds). More rounds would make every size slower
for that corner, in which the model says too much anyway (above)."""


class PrefillWaiting:
    """A pool of prefill workers in the steady state: times from a prompt's arrival to the end of its prefill.

    ``utilisation`` is the part of the pool's capacity, at its largest batch, that is in use;
    ``is_overloaded`` says that prompts come faster than that.
    """

    def __init__(
        self,
        prompts: Prompts,
        kind: WorkerKind,
        workers: int,
        requests_per_ms: float,
        burstiness: float,
        dispersions: Sequence[tuple[float, float]] = (),
    ) -> None:
        self._prompts = prompts
        self._workers = workers
        self._rate = requests_per_ms
        self._batch = largest_batch(prompts, kind)
        full_ms = prompts.fixed_ms + self._batch * prompts.mean_ms
        self.utilisation = requests_per_ms * full_ms / self._batch / workers
        self.is_overloaded = self.utilisation >= 1.0
        self._prompt_ms = full_ms / self._batch / workers
        self._dispersions = dispersions if burstiness > 1 else ()
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

        ``extra_ms_per_token`` is added for each computed token of a prompt: the transfer of its KV entries.
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
        return max(self._chance_in_queue(longer_than_ms), self._chance_in_burst(longer_than_ms))

    def _chance_in_burst(self, longer_than_ms: float) -> float:
        """Return the chance that a burst leaves an arrival that long a wait, by the worst time scale."""
        chance = 0.0
        for scale_s, index in self._dispersions:
            if index > 0:
                number = self._rate * 1000 * scale_s + index
                room = (1000 * scale_s + longer_than_ms) / self._prompt_ms
                chance = max(chance, gamma_tail(room, number, number * index))
        return chance

    def _chance_in_queue(self, longer_than_ms: float) -> float:
        near = gamma_tail(longer_than_ms, self._near_ms, self._near_variance)
        if self._far < NEGLIGIBLE:
            return self._waiting * near
        far = gamma_tail(longer_than_ms, self._near_ms + self._far_ms, self._near_variance + self._far_ms**2)
        return self._waiting * ((1 - self._far) * near + self._far * far)

    def _find_near_wait(self, burstiness: float) -> None:
        """Set the chance C of waiting at all, and mean and variance of the near wait."""
        prompts, workers, rate = self._prompts, self._workers, self._rate
        batch = arriving = 1.0
        for _ in range(BATCH_ITERATIONS):
            step_ms = prompts.fixed_ms + batch * prompts.mean_ms
            load = rate * step_ms / batch
            waiting = probability_of_waiting(workers, load)
            # Arrivals go to idle workers first: a batch grows only while all workers are busy.
            arriving = rate / workers * step_ms * waiting / min(load / workers, 1.0)
            batch = (batch + min(self._batch, arriving + math.exp(-arriving))) / 2
        variance = batch * prompts.variance_ms
        found_ms = step_ms + variance / step_ms
        mates = min(arriving * found_ms / step_ms, self._batch - 1)
        stretch = PREFILL_WAIT_MARGIN * _burst_ratio(burstiness, variance / step_ms**2)
        self._waiting = waiting
        self._near_ms = stretch * (found_ms / 2 + mates * prompts.mean_ms)
        self._near_variance = stretch**2 * (found_ms**2 / 12 + mates * prompts.square_ms)

    def _find_far_wait(self, full_ms: float, burstiness: float) -> None:
        """Set the chance Q of the far wait (the module's second page), and its mean."""
        workers, rate, batch = self._workers, self._rate, self._batch
        room_ms = batch / rate - full_ms / workers
        bursts = 1 + (burstiness - 1) * self.utilisation**2
        spread = batch * self._prompts.variance_ms / workers**2 + bursts * batch / rate**2
        mean_ms = spread / room_ms / 2
        self._far = math.exp(-workers * batch / rate / mean_ms) if mean_ms else 0.0
        self._far_ms = PREFILL_WAIT_MARGIN * mean_ms


def largest_batch(prompts: Prompts, kind: WorkerKind) -> float:
    """Return B of the module: the mean number of prompts in one step of a worker under pressure."""
    by_tokens = kind.settings.batched_tokens / max(prompts.mean_tokens, 1.0)
    return max(1.0, min(kind.concurrent_prefills / 2, by_tokens))


def _burst_ratio(burstiness: float, service_variation: float) -> float:
    """Return how much longer a wait is than with Poisson arrivals (Allen and Cunneen)."""
    return (burstiness + service_variation) / (1 + service_variation)
