"""One decode worker in the steady state: how long its steps are, and how much an answer's ITL varies.

There is no queue here. A worker takes every request at once and decodes all of them in each step
(continuous batching), so load shows as longer steps, until the request slots or the KV cache are full.

**Symbols** (times in ms)

    r         requests per ms for this worker
    b         variance over mean of the number of arrivals (``queueing_model.py``)
    S, ctx    decode steps of an answer; context of a request that is decoded, tokens, its mean where a
              number is meant (``workload.py``)
    D(k, kv)  a step that decodes k requests with kv tokens of KV cache among them (the profile)
    x         mean time of a step as a request sees it, itself included; also used for the worker's steps
    n         mean number of requests in flight, which a request finds beside itself
    N         their number at a moment; s, its usual deviation sqrt(n (1 + (b - 1) evenness))
    e         feedback of the batch on itself, below 1
    own, m    what a prompt adds to a step (``workload.py``), and its mean; aggregated workers only
    f         what a step that begins prompts takes longer besides: T(0) - D(1, 0), at least 0
    p         part of the steps in which a prompt begins, 1 - exp(-r x)
    A(u)      what averaging over u lifetimes leaves of a variance

**Steady state.** By Little's law (1961) n = r E[S] x. A request finds n others (arrivals see time
averages), so

    x = D(1 + n, (1 + n) ctx)                            decode only
    x = (D(1 + n, (1 + n) ctx) + p f) / (1 - r m)        aggregated

since r x prompts arrive in a step and prolong the next one by r x m. The balance is found by iteration
from the idle worker (x = D(1, ctx)) upwards. D rises with n, so the iteration rises too and stops at the
smallest solution: the state that a worker reaches from empty. There may be slower ones, which a worker
reaches only by a surge. Overload, which a divergence also ends in, is each of: r m >= 1; n >= request slots;
n ctx > KV cache; r x (mean prompt tokens) > tokens of a step - n. After ``MAX_ITERATIONS`` without overload
the last x counts as found, though it is somewhat short.

**Fluctuation of the batch.** Requests in flight are those of an infinite-server queue, so Var(N) = s^2
without feedback (peakedness, ``workload.py``). A batch of z usual deviations too many prolongs the step by

    growth(z) = (D(1 + n + z s, (1 + n) ctx + z s sqrt(E[ctx^2])) - D(1 + n, (1 + n) ctx)) / (1 - r m)

(KV varies as a compound Poisson sum; 1 - r m only on aggregated workers.) Longer steps keep requests
longer, with the feedback

    e = r E[S] (growth(1) - growth(-1)) / (2 s),  0 to ``MAX_FEEDBACK``

(one deviation to either side, because a measured profile has cliffs). Linearised around the balance, the
variance grows by 1 / (1 - e), and the batch returns to its mean more slowly by the same factor. Overload is
therefore also (1 + n) ctx + h sqrt(E[ctx^2]) > KV cache, and with prefill workers 1 + n + h > request slots,
with

    h = FULL s sqrt(q / (1 - e)),  q = CLUSTERS on aggregated workers, else 1

**ITL of an answer** of S steps is the mean over its steps, so fluctuations average out:

    Var(ITL | S) = slow A(S / t) + fast / S,   A(u) = 2 (u - 1 + exp(-u)) / u^2
    chance(ITL > limit | S) = NormalTail((limit - x) / (MARGIN sqrt(Var(ITL | S))))
    slow = ((limit - x) / z)^2 / (1 - e)   with z from   growth(z) = limit - x
    t    = E[S^2] / (2 E[S]) / (1 - e) steps
    fast = CLUSTERS r x (Var(own) + b (m^2 + 2 f m + (1 - p) f^2)) / ((1 - r m)^2 (1 - e))    aggregated
    fast = 0                                                                                  decode only

*slow* is the variance of the step by the batch, put so that a profile with a cliff is judged by the batch
that reaches the limit; on a straight one it is (growth(1))^2 / (1 - e). growth is read at ``SWINGS`` and
straight between them; z is straight on below the first and beyond the last. Its correlation dies away over
t, the mean rest of an answer; A is the variance left of an exponentially correlated process after averaging
over u correlation times. *fast* is the variance of one step by its prompts: their lengths, their number,
and whether there is one (an upper estimate: exactly, 2 f m has the factor 1 - p too, and f^2 has p (1 - p)
for r x (1 - p)). It is taken to be independent from step to step; that long steps gather more prompts, so
that a long one follows, is what ``CLUSTERS`` stands for. The chance for all answers is the mean over the
lengths of answers with a decode step, by their shares.

**TTFT on an aggregated worker** = wait + own computing. A prompt of i tokens computes for

    ceil(i / (tokens of a step - n)) D(1 + n, (1 + n) ctx) + f + own

one decode step for each of its chunks besides its own cost. It waits for the rest of the step that runs,
and for the prompts that came during it. Exactly as for prefill workers, an arrival finds longer steps:

    V     = (r x E[own^2] + p (1 - p) f^2) / (1 - (r m)^2)          variance of a step
    found = x + V / x                                               mean length of the step found
    rest  : mean found / 2,  variance max(E3 / (3 x) - (found / 2)^2, found^2 / 12)
    E3    = x^3 + 3 x V + r x E[own^3]                              third moment of a step
    wait  : mean WAIT_MARGIN (found / 2 + r m found)
            variance WAIT_MARGIN^2 ((1 + r m)^2 x variance of rest + r found E[own^2])

1 - (r m)^2, because a long step gathers prompts and the next one is long too; (1 + r m), because a long
rest does. chance(TTFT > limit) sums the tail of a gamma distribution of that mean and variance over the
prompt lengths. b is in the wait for a slot alone: else arrivals at one worker count as Poisson.

**Slots.** All c slots of an aggregated worker may be taken: with the chance ErlangC(c, a) (``waiting.py``), a
being the mean number of slots in use. Then a request waits for one, too, exponentially with the mean M:

    a = r held      held = own computing + E[S] x
    M = (b + v) / 2  held / (c - a)                                 v = E[S^2] / E[S]^2 - 1

(b + v) / 2 is Allen and Cunneen's; a >= c is overload. No batch is larger than c.

**Where it is wrong.** Workers that take turns (round-robin) wait less than Poisson arrivals would, and
bursts make them wait longer (0.77 to 1.82 times the simulated 95th percentile; ITL 0.92 to 1.25, ``python -m
tests.bench sla``). Preemption, requests that wait for KV blocks, and surges into the slower balance are not
modelled: the bound of ``CAPACITY_DEVIATIONS`` deviations keeps away from them.

**Sources.** Little, A proof for the queuing formula L = lambda W, 1961; peakedness as in ``workload.py``;
Kleinrock, Queueing Systems I, 1975, section 5.2 (rest of a step). The linearised feedback, slow and fast
are this project's own.
"""

from __future__ import annotations

import math
from functools import cached_property

from dynaplan.planner.sizing.queueing.waiting import gamma_tail, normal_tail, probability_of_waiting
from dynaplan.planner.sizing.queueing.workload import Answers, Prompts, WorkerKind

MAX_ITERATIONS = 200
"""Most rounds of the iteration towards x; near saturation it is slow."""

CONVERGENCE = 1e-4
"""Relative change of x below which it counts as found."""

MAX_FEEDBACK = 0.95
"""Largest feedback e that is counted with: at 1 the linearised variance would be infinite."""

CAPACITY_DEVIATIONS = 2.58
"""Standard deviations above the mean that must fit the slots and the KV cache: all but 0.5 % of the time."""

NEGLIGIBLE = 1e-4
"""Chance of a wait for a slot below which it counts as 0."""

SWINGS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""Standard deviations of the batch at which the time of a step is looked up; between them a straight line."""

CLUSTERS = 2.0
"""Factor on the variance of the prompts in an answer's lifetime (in *fast*, and in the room that slots and KV
cache need): long steps gather more of them, so they come in clusters. Measured on one aggregated worker, two
profiles, three shapes, 50 to 85 % load: the 95th percentile of the ITL is 0.93 to 1.09 times the simulated
one (mean 1.00); with a factor of 1 it is 0.91 in the mean, with 3 it is 1.07."""

ITL_MARGIN = 1.1
"""Factor on the deviation of the ITL, so that the model errs upwards. Measured on 48 pools (``tests.bench
sla``: two profiles, three shapes, 1 and 3 workers, 30 to 85 % load), predicted over simulated 95th percentile
of the ITL: 0.97 to 1.28, mean 1.05, 8 % of the pools underrated; aggregated 0.95 to 1.26, mean 1.07, 17 %.
With 1 they are 35 % and 27 %, the lowest 0.96 and 0.92; with 1.2 both 6 %, the means 1.06 and 1.10."""

WAIT_MARGIN = 1.2
"""Factor on mean and deviation of a prompt's wait on an aggregated worker, for the same reason. On the same
pools, 95th percentile of the TTFT: 0.87 to 1.92, mean 1.23, and 25 % underrated. With 1 that is 0.76 to 1.70,
mean 1.12, 42 %; with 1.4 it is 0.95 to 2.15, mean 1.33, 10 %."""


class DecodeBatch:
    """One decode worker with its part of the demand; aggregated when ``prompts`` are given. Times in ms.

    ``step_ms`` is x of the module, ``batch`` is n; ``overload`` says what does not fit, "" when all does.
    """

    def __init__(
        self,
        answers: Answers,
        prompts: Prompts | None,
        kind: WorkerKind,
        requests_per_ms: float,
        burstiness: float,
    ) -> None:
        self._answers = answers
        self._kind = kind
        self._rate = requests_per_ms
        self._prompts = prompts
        self._prompt_ms = prompts.mean_ms if prompts else 0.0
        self._free = 1.0 - requests_per_ms * self._prompt_ms  # the part of its time without prompts
        self._start_ms = max(prompts.fixed_ms - kind.decode_ms(1, 0.0), 0.0) if prompts else 0.0
        self.step_ms = self._decode_ms = kind.decode_ms(1, answers.context_tokens)
        self.batch = 0.0
        self.overload = self._settle()
        self._burstiness = burstiness
        self._spread = math.sqrt(max(0.0, 1.0 + (burstiness - 1.0) * answers.evenness))
        self._feedback = 0.0
        if not self.overload:
            self._feedback = min(MAX_FEEDBACK, self._find_feedback())
            self.overload = self._too_full()

    @property
    def prefill_share(self) -> float:
        """Part of its time in which the worker computes prompts, 0 to 1."""
        return self._rate * self._prompt_ms + self._chance_of_start() * self._start_ms / self.step_ms

    @property
    def kv_usage(self) -> float:
        """Mean part of the KV cache that is in use, 0 to 1."""
        return self.batch * self._answers.context_tokens / self._kind.kv_tokens

    def chance_of_itl_over(self, limit_ms: float) -> float:
        """Return the part of the answers of 2 tokens or more whose ITL exceeds the limit.

        1 when overloaded.
        """
        if self.overload:
            return 1.0
        room_ms = limit_ms - self.step_ms
        slow, fast = self._slow_deviation_ms(room_ms) ** 2, self._fast_variance
        return sum(
            share * _chance_over(room_ms, ITL_MARGIN * math.sqrt(slow * slowly + fast * quickly))
            for share, slowly, quickly in self._averaging
        )

    def chance_of_ttft_over(self, limit_ms: float) -> float:
        """Return the part of the requests whose TTFT on this aggregated worker exceeds it.

        1 when overloaded.
        """
        if self.overload or not self._prompts:
            return 1.0
        mean_ms, variance = self._wait()
        full, slot_ms = self._slot_wait
        waits = [(1 - full, mean_ms, variance)]
        if full > NEGLIGIBLE:
            waits.append((full, mean_ms + slot_ms, variance + slot_ms**2))
        return sum(
            share * part * gamma_tail(limit_ms - self._own_ms(tokens, own_ms), wait_ms, wait_variance)
            for tokens, own_ms, share in self._prompts.points
            for part, wait_ms, wait_variance in waits
        )

    @property
    def mean_ttft_ms(self) -> float:
        """Mean TTFT on this aggregated worker, ms, of a prompt of mean length; infinite when overloaded."""
        if self.overload or not self._prompts:
            return math.inf
        return self.ttft_of(self._prompts.mean_tokens, self._prompt_ms)

    def ttft_of(self, tokens: float, own_ms: float, deviations: float = 0.0) -> float:
        """Return the TTFT here, ms, of a prompt with that many tokens to compute; infinite when overloaded.

        It waits ``deviations`` standard deviations longer than on average.
        """
        if self.overload:
            return math.inf
        wait_ms, variance = self._wait()
        full, slot_ms = self._slot_wait
        wait_ms, variance = wait_ms + full * slot_ms, variance + (2 - full) * full * slot_ms**2
        return self._own_ms(tokens, own_ms) + wait_ms + deviations * math.sqrt(variance)

    # -- the steady state --------------------------------------------------------------------------

    def _settle(self) -> str:
        """Set step time and batch to their smallest balance; return what is overloaded, or ""."""
        slots, kv_tokens = self._kind.settings.request_slots, self._kind.kv_tokens
        context, steps = self._answers.context_tokens, self._rate * self._answers.mean_steps
        if self._free <= 0:
            return "prompts come faster than they can be computed"
        for _ in range(MAX_ITERATIONS):
            self.batch = steps * self.step_ms
            if self.batch >= slots:
                return f"the {slots} slots of a worker are full"
            if self.batch * context > kv_tokens:
                return "the KV cache of a worker is full"
            batch = min(1 + self.batch, slots)
            self._decode_ms = self._kind.decode_ms(batch, batch * context)
            before_ms = self.step_ms
            self.step_ms = (self._decode_ms + self._chance_of_start() * self._start_ms) / self._free
            if abs(self.step_ms - before_ms) <= CONVERGENCE * before_ms:
                break
        budget = self._kind.settings.batched_tokens - self.batch
        if self._prompts and self._rate * self.step_ms * self._prompts.mean_tokens > budget:
            return f"prompts need more than the {self._kind.settings.batched_tokens} tokens of a step"
        return ""

    def _chance_of_start(self) -> float:
        """Return p, the part of the steps in which a prompt begins."""
        return -math.expm1(-self._rate * self.step_ms) if self._prompts else 0.0

    def _find_feedback(self) -> float:
        """Return e of the module, without its upper bound."""
        deviation = self._spread * math.sqrt(self.batch)
        if deviation <= 0:
            return 0.0
        more_ms = (self._growth_ms(1.0) - self._growth_ms(-1.0)) / (2 * deviation)
        return max(0.0, self._rate * self._answers.mean_steps * more_ms)

    def _growth_ms(self, deviations: float) -> float:
        """Return growth(z) of the module, in ms, for z = ``deviations``."""
        answers, more = self._answers, deviations * self._spread * math.sqrt(self.batch)
        batch = min(max(1.0, 1 + self.batch + more), self._kind.settings.request_slots)
        kv_tokens = (1 + self.batch) * answers.context_tokens + more * math.sqrt(answers.context_square)
        return (self._kind.decode_ms(batch, max(kv_tokens, 1.0)) - self._decode_ms) / self._free

    def _too_full(self) -> str:
        """Say which of slots and KV cache would overflow in more than 0.5 % of the time; "" for none."""
        kind, answers = self._kind, self._answers
        clusters = CLUSTERS if self._prompts else 1.0
        spread = CAPACITY_DEVIATIONS * self._spread * math.sqrt(clusters * self.batch / (1 - self._feedback))
        slots = kind.settings.request_slots
        if self._prompts and self._rate * self._held_ms >= slots:
            return f"the {slots} slots of a worker are full"
        if not self._prompts and 1 + self.batch + spread > slots:
            return f"the {slots} slots of a worker would often be full"
        kv_tokens = (1 + self.batch) * answers.context_tokens + spread * math.sqrt(answers.context_square)
        if kv_tokens > kind.kv_tokens:
            return "the KV cache of a worker would often be full"
        return ""

    # -- what varies -------------------------------------------------------------------------------

    @cached_property
    def _averaging(self) -> list[tuple[float, float, float]]:
        """The answer lengths of 1 step or more: share among these, A(S / t) and 1 / S."""
        answers = self._answers
        settle_steps = answers.square_steps / max(answers.mean_steps, 1e-9) / 2 / (1 - self._feedback)
        points = list(zip(answers.points.tokens, answers.points.shares, strict=True))
        known = sum(share for steps, share in points if steps > 0)
        return [
            (share / known, _left_after_averaging(steps / settle_steps), 1 / steps)
            for steps, share in points
            if steps > 0
        ]

    def _slow_deviation_ms(self, room_ms: float) -> float:
        """Return sqrt(slow) of the module, for limit - x = ``room_ms``, which may be below 0.

        Looks for the deviations z with growth(z) = ``room_ms`` (growth(-z) below 0), between two of
        ``SWINGS``. Feedback is included.
        """
        side, room_ms = math.copysign(1.0, room_ms), abs(room_ms)
        before, grown_before_ms = SWINGS[0], abs(self._growth_ms(side * SWINGS[0]))
        slope_ms = grown_before_ms
        for swing in SWINGS[1:]:
            if grown_before_ms >= room_ms:
                break
            grown_ms = max(grown_before_ms, abs(self._growth_ms(side * swing)))
            slope_ms = grown_ms / swing
            if grown_ms >= room_ms:
                part = (room_ms - grown_before_ms) / (grown_ms - grown_before_ms)
                slope_ms = room_ms / (before + part * (swing - before))
            before, grown_before_ms = swing, grown_ms
        return slope_ms / math.sqrt(1 - self._feedback)

    @cached_property
    def _fast_variance(self) -> float:
        """*fast* of the module, in ms squared."""
        if not self._prompts:
            return 0.0
        start_ms, none = self._start_ms, 1 - self._chance_of_start()
        by_number = self._prompt_ms**2 + 2 * start_ms * self._prompt_ms + start_ms**2 * none
        per_prompt = self._prompts.variance_ms + self._burstiness * by_number
        per_step = self._rate * self.step_ms * per_prompt / self._free**2
        return CLUSTERS * per_step / (1 - self._feedback)

    def _own_ms(self, tokens: float, own_ms: float) -> float:
        """Return the ms of a prompt's computing: a decode step a chunk, f of the module, and ``own_ms``."""
        budget = max(self._kind.settings.batched_tokens - self.batch, 1.0)
        return math.ceil(tokens / budget) * self._decode_ms + self._start_ms + own_ms

    @property
    def _held_ms(self) -> float:
        """How long a request of this aggregated worker holds its slot, in the mean."""
        assert self._prompts
        computing_ms = self._own_ms(self._prompts.mean_tokens, self._prompt_ms)
        return computing_ms + self._answers.mean_steps * self.step_ms

    @cached_property
    def _slot_wait(self) -> tuple[float, float]:
        """The chance that a request waits for a slot, and how many ms those wait in the mean."""
        slots, answers, held_ms = self._kind.settings.request_slots, self._answers, self._held_ms
        used = self._rate * held_ms
        variation = answers.square_steps / answers.mean_steps**2 - 1 if answers.mean_steps else 0.0
        wait_ms = (self._burstiness + variation) / 2 * held_ms / (slots - used)
        return probability_of_waiting(slots, used), wait_ms

    def _wait(self) -> tuple[float, float]:
        """Return mean (ms) and variance (ms squared) of the wait, as in the module."""
        assert self._prompts
        step_ms, rate, prompts = self.step_ms, self._rate, self._prompts
        begins, share = self._chance_of_start(), rate * self._prompt_ms
        variance = rate * step_ms * prompts.square_ms + (1 - begins) * begins * self._start_ms**2
        variance /= 1 - share * share  # A long step gathers prompts, and the next one is long too.
        found_ms = step_ms + variance / step_ms
        rest_ms = found_ms / 2
        cube = step_ms**3 + 3 * step_ms * variance + rate * step_ms * prompts.cube_ms
        rest_variance = max(cube / (3 * step_ms) - rest_ms**2, found_ms**2 / 12)
        spread = rest_variance * (1 + share) ** 2 + rate * found_ms * prompts.square_ms
        return WAIT_MARGIN * (rest_ms + found_ms * share), WAIT_MARGIN**2 * spread


def _left_after_averaging(lifetimes: float) -> float:
    """Return A(u): the part of an exponentially correlated variance left after averaging over u lifetimes."""
    if lifetimes < 1e-3:
        return 1.0
    return 2 * (lifetimes - 1 + math.exp(-lifetimes)) / lifetimes**2


def _chance_over(room_ms: float, deviation_ms: float) -> float:
    """Return the chance of a normal deviation of more than ``room_ms``."""
    if deviation_ms <= 0:
        return 0.0 if room_ms >= 0 else 1.0
    return normal_tail(room_ms / deviation_ms)
