"""One decoding worker in the steady state: how long its steps are, and how much they vary.

By Little's law ``rate * steps * step time`` requests are in the batch, and the batch makes the step time. An
aggregated worker computes prompts in the same steps: they prolong the steps of everybody in the batch, and
whoever comes waits for the step that runs.
"""

from __future__ import annotations

import math
from functools import cached_property

from dynaplan.core.sizing.waiting import gamma_tail, normal_tail
from dynaplan.core.sizing.workload import Answers, Prompts, WorkerKind

ROUNDS = 200
CLOSE_ENOUGH = 1e-4
MOST_FEEDBACK = 0.95
FULL = 2.58
"""Standard deviations above the mean that must fit the slots and the KV cache: all but 0.5 % of the time."""

SWINGS = (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""Standard deviations of the batch at which the time of a step is looked up."""

CLUSTERS = 2.0
"""How much more the prompts in a request's lifetime vary than Poisson ones: they cluster, because a long step
gathers more of them. Measured against the engine model."""

MARGIN = 1.1
"""What standard deviations are multiplied by: measured likewise, the ITL is seldom underrated then."""

WAIT_MARGIN = 1.2
"""What the waiting of a prompt on an aggregated worker is multiplied by, for the same reason."""


class DecodeBatch:
    """One worker and its part of the demand; aggregated when there are prompts. Times in ms."""

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
        self._free = 1.0 - requests_per_ms * self._prompt_ms
        self._start_ms = max(prompts.fixed_ms - kind.decode_ms(1, 0.0), 0.0) if prompts else 0.0
        self.step_ms = self._decode_ms = kind.decode_ms(1, answers.context_tokens)
        self.batch = 0.0
        self.overload = self._settle()
        self._burstiness = burstiness
        self._spread = math.sqrt(max(0.0, 1.0 + (burstiness - 1.0) * answers.evenness))
        self._feedback = 0.0
        if not self.overload:
            self._feedback = min(MOST_FEEDBACK, self._elasticity())
            self.overload = self._too_full()

    @property
    def prefill_share(self) -> float:
        """The part of its time in which the worker computes prompts."""
        return self._rate * self._prompt_ms + self._chance_of_start() * self._start_ms / self.step_ms

    @property
    def kv_usage(self) -> float:
        """The mean part of the KV cache that is in use."""
        return self.batch * self._answers.context_tokens / self._kind.kv_tokens

    def chance_of_itl_over(self, limit_ms: float) -> float:
        """The part of the requests whose mean ITL is longer than that; those of one token have none."""
        if self.overload:
            return 1.0
        room_ms = limit_ms - self.step_ms
        slow, fast = self._slow_deviation_ms(room_ms) ** 2, self._fast_variance
        return sum(
            share * _over(room_ms, MARGIN * math.sqrt(slow * slowly + fast * quickly))
            for share, slowly, quickly in self._averages
        )

    def chance_of_ttft_over(self, limit_ms: float) -> float:
        """The part of the requests whose TTFT on this aggregated worker is longer than that."""
        if self.overload or not self._prompts:
            return 1.0
        mean_ms, variance = self._wait()
        return sum(
            share * gamma_tail(limit_ms - self._own_ms(tokens, own_ms), mean_ms, variance)
            for tokens, own_ms, share in self._prompts.points
        )

    @property
    def mean_ttft_ms(self) -> float:
        """The mean TTFT on this aggregated worker."""
        if self.overload or not self._prompts:
            return math.inf
        return self._own_ms(self._prompts.mean_tokens, self._prompt_ms) + self._wait()[0]

    # -- the steady state --------------------------------------------------------------------------

    def _settle(self) -> str:
        """Find step time and batch, from the idle worker upwards: the first balance is the one it reaches."""
        slots, kv_tokens = self._kind.settings.request_slots, self._kind.kv_tokens
        context, steps = self._answers.context_tokens, self._rate * self._answers.mean_steps
        if self._free <= 0:
            return "prompts come faster than they can be computed"
        for _ in range(ROUNDS):
            self.batch = steps * self.step_ms
            if self.batch > slots:
                return f"the {slots} slots of a worker are full"
            if self.batch * context > kv_tokens:
                return "the KV cache of a worker is full"
            self._decode_ms = self._kind.decode_ms(1 + self.batch, (1 + self.batch) * context)
            before_ms = self.step_ms
            self.step_ms = (self._decode_ms + self._chance_of_start() * self._start_ms) / self._free
            if abs(self.step_ms - before_ms) <= CLOSE_ENOUGH * before_ms:
                break
        budget = self._kind.settings.batched_tokens - self.batch
        if self._prompts and self._rate * self.step_ms * self._prompts.mean_tokens > budget:
            return f"prompts need more than the {self._kind.settings.batched_tokens} tokens of a step"
        return ""

    def _chance_of_start(self) -> float:
        """The part of the steps in which a prompt begins."""
        return -math.expm1(-self._rate * self.step_ms) if self._prompts else 0.0

    def _elasticity(self) -> float:
        """By how many per cent one per cent more requests in the batch prolong the step.

        As the batch grows and shrinks by what is usual: a measured profile has cliffs, which it crosses.
        """
        deviation = self._spread * math.sqrt(self.batch)
        if deviation <= 0:
            return 0.0
        more_ms = (self._grown_ms(1.0) - self._grown_ms(-1.0)) / (2 * deviation)
        return max(0.0, self._rate * self._answers.mean_steps * more_ms)

    def _grown_ms(self, deviations: float) -> float:
        """By how much steps take longer with so many standard deviations more in the batch than usual."""
        answers, more = self._answers, deviations * self._spread * math.sqrt(self.batch)
        batch = max(1.0, 1 + self.batch + more)
        kv_tokens = (1 + self.batch) * answers.context_tokens + more * math.sqrt(answers.context_square)
        return (self._kind.decode_ms(batch, max(kv_tokens, 1.0)) - self._decode_ms) / self._free

    def _too_full(self) -> str:
        """Whether the slots or the KV cache would overflow now and then."""
        kind, answers = self._kind, self._answers
        clusters = CLUSTERS if self._prompts else 1.0
        spread = FULL * self._spread * math.sqrt(clusters * self.batch / (1 - self._feedback))
        if 1 + self.batch + spread > kind.settings.request_slots:
            return f"the {kind.settings.request_slots} slots of a worker would often be full"
        kv_tokens = (1 + self.batch) * answers.context_tokens + spread * math.sqrt(answers.context_square)
        if kv_tokens > kind.kv_tokens:
            return "the KV cache of a worker would often be full"
        return ""

    # -- what varies -------------------------------------------------------------------------------

    @cached_property
    def _averages(self) -> list[tuple[float, float, float]]:
        """For each number of steps its share, and what is left of slow and fast variances in their mean."""
        answers = self._answers
        settle_steps = answers.square_steps / max(answers.mean_steps, 1e-9) / 2 / (1 - self._feedback)
        points = list(zip(answers.points.tokens, answers.points.shares, strict=True))
        known = sum(share for steps, share in points if steps > 0)
        return [
            (share / known, _averaged(steps / settle_steps), 1 / steps)
            for steps, share in points
            if steps > 0
        ]

    def _slow_deviation_ms(self, room_ms: float) -> float:
        """Of the step time, while the batch grows and shrinks; for the question whether it grows by so much.

        That is decided by how many standard deviations of the batch it takes, be the step time a straight
        line until there or a cliff. Long steps keep requests longer: feedback.
        """
        side, room_ms = math.copysign(1.0, room_ms), abs(room_ms)
        before, grown_before_ms = SWINGS[0], abs(self._grown_ms(side * SWINGS[0]))
        slope_ms = grown_before_ms
        for swing in SWINGS[1:]:
            if grown_before_ms >= room_ms:
                break
            grown_ms = max(grown_before_ms, abs(self._grown_ms(side * swing)))
            slope_ms = grown_ms / swing
            if grown_ms >= room_ms:
                part = (room_ms - grown_before_ms) / (grown_ms - grown_before_ms)
                slope_ms = room_ms / (before + part * (swing - before))
            before, grown_before_ms = swing, grown_ms
        return slope_ms / math.sqrt(1 - self._feedback)

    @cached_property
    def _fast_variance(self) -> float:
        """Of one step, by the prompts that happen to be in it."""
        if not self._prompts:
            return 0.0
        start_ms, none = self._start_ms, 1 - self._chance_of_start()
        of_number = self._prompt_ms**2 + 2 * start_ms * self._prompt_ms + start_ms**2 * none
        of_prompt = self._prompts.variance_ms + self._burstiness * of_number
        of_step = self._rate * self.step_ms * of_prompt / self._free**2
        return CLUSTERS * of_step / (1 - self._feedback)

    def _own_ms(self, tokens: float, own_ms: float) -> float:
        """A prompt's own computing: with one step's decoding, and one more for each further chunk."""
        budget = max(self._kind.settings.batched_tokens - self.batch, 1.0)
        return math.ceil(tokens / budget) * self._decode_ms + self._start_ms + own_ms

    def _wait(self) -> tuple[float, float]:
        """Mean and variance of what passes before: the step that runs, and whoever came in it too."""
        assert self._prompts
        step_ms, rate, prompts = self.step_ms, self._rate, self._prompts
        begins, share = self._chance_of_start(), rate * self._prompt_ms
        variance = rate * step_ms * prompts.square_ms + (1 - begins) * begins * self._start_ms**2
        variance /= 1 - share * share  # a long step gathers prompts, and the next one is long too
        found_ms = step_ms + variance / step_ms  # a step as one finds it
        rest_ms = found_ms / 2
        cube = step_ms**3 + 3 * step_ms * variance + rate * step_ms * prompts.cube_ms
        rest_variance = max(cube / (3 * step_ms) - rest_ms**2, found_ms**2 / 12)
        spread = rest_variance * (1 + share) ** 2 + rate * found_ms * prompts.square_ms
        return WAIT_MARGIN * (rest_ms + found_ms * share), WAIT_MARGIN**2 * spread


def _averaged(lifetimes: float) -> float:
    """What is left of a variance that dies away exponentially, averaged over so many of its lifetimes."""
    if lifetimes < 1e-3:
        return 1.0
    return 2 * (lifetimes - 1 + math.exp(-lifetimes)) / lifetimes**2


def _over(room_ms: float, deviation_ms: float) -> float:
    if deviation_ms <= 0:
        return 0.0 if room_ms >= 0 else 1.0
    return normal_tail(room_ms / deviation_ms)
