"""A burst as a fluid: the queue of prompts and the requests that decode, pull by pull, with fixed workers.

The formulas stand in ``standing.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.planner.bursts.memory import Decoding
from dynaplan.planner.sizing.queueing.prefill_model import largest_batch
from dynaplan.planner.sizing.queueing.queueing_model import FIRST_TOKEN_STEPS, SteadyState

MOST_BUSY = 0.95
"""Largest part of an aggregated worker's time that prompts take in the step's formula: at 1 it never ends."""


MOST_POWER, LEAST_POWER = 700.0, 1e-6
"""Powers of e beyond which a float ends, and below which the limit of a quotient is exact enough."""

MOST_STAGES = 8
"""Stages of an answer at most: each costs time of a decision, and more only sharpen the end of an answer."""

HALVINGS = 20
"""Halvings of the number of requests that a worker decodes at once within the ITL target: to a millionth."""


@dataclass(frozen=True)
class Work:
    """The cost of an interval's requests: prompts/s of a worker, room for waiting in s, and an answer's."""

    state: SteadyState
    targets: SlaTargets

    @property
    def prompts_per_s(self) -> float:
        """Prompts/s of a worker at its largest batch; of an aggregated one, of one at a time."""
        prompts, service = self.state.prompts, self.state.service
        batch = 1.0 if service.prefill is None else largest_batch(prompts, service.prefill)
        return 1000 * batch / (prompts.fixed_ms + batch * prompts.mean_ms)

    @property
    def room_s(self) -> float:
        """Seconds that a prompt may wait and still keep its target, at least 0."""
        prompts, service = self.state.prompts, self.state.service
        own_ms = prompts.fixed_ms + prompts.mean_ms
        if service.prefill is not None:
            own_ms += service.transfer_ms + service.transfer_ms_per_token * prompts.mean_tokens
            own_ms += FIRST_TOKEN_STEPS * self.targets.itl_ms / 2
        return max(0.0, self.targets.ttft_ms - own_ms) / 1000

    @property
    def unevenness(self) -> float:
        """Variance over mean of Poisson arrivals, and of the work that they bring: 1 + cv^2 of a prompt."""
        prompts = self.state.prompts
        return 1 + prompts.variance_ms / (prompts.mean_ms + prompts.fixed_ms) ** 2

    @property
    def most_at_once(self) -> float:
        """The most requests that one worker decodes at once: its slots, or what its KV cache holds."""
        kind, context = self.state.service.decode, self.state.answers.context_tokens
        return max(1.0, min(float(kind.settings.request_slots), kind.kv_tokens / context))

    def step_ms(self, requests: float, prompts_per_s: float = 0.0) -> float:
        """Return the ms of a step of one worker with that many requests, and prompts at that rate beside."""
        context, batch = self.state.answers.context_tokens, max(1.0, requests)
        busy = min(prompts_per_s * self.beside_ms / 1000, MOST_BUSY)
        return self.state.service.decode.decode_ms(batch, batch * context) / (1 - busy)

    @cached_property
    def beside_ms(self) -> float:
        """The ms that a prompt adds to the steps of requests that decode, on average."""
        prompts, fixed_decode_ms = self.state.prompts, self.state.service.decode.decode_ms(1, 0.0)
        return max(0.0, prompts.fixed_ms - fixed_decode_ms) + prompts.mean_ms

    @cached_property
    def stages(self) -> int:
        """The stages of an answer: Erlang's k = mean^2 / variance of its steps, a whole number."""
        answers = self.state.answers
        variance = answers.square_steps - answers.mean_steps**2
        stages = answers.mean_steps**2 / max(variance, 1e-9)
        return max(1, round(min(stages, MOST_STAGES)))

    @cached_property
    def is_always_in_time(self) -> bool:
        """Full workers keep the ITL target."""
        return self.step_ms(self.most_at_once) <= self.targets.itl_ms

    @cached_property
    def most_in_time(self) -> float:
        """The most requests that one worker decodes at once within the ITL target, at least 1."""
        low, high = 1.0, self.most_at_once
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.step_ms(middle) <= self.targets.itl_ms else (low, middle)
        return low


def queued(load: float, arrived: float, pull_s: float, per_s: float, room_s: float) -> tuple[float, float]:
    """Return the queue after a pull, and the part of its arrivals whose wait exceeds the room."""
    after = load + arrived - per_s * pull_s
    first_s, last_s = load / per_s, max(0.0, after) / per_s
    low_s, high_s = min(first_s, last_s), max(first_s, last_s)
    if high_s <= room_s:
        return max(0.0, after), 0.0
    part = 1.0 if low_s >= room_s else (high_s - room_s) / (high_s - low_s)
    return max(0.0, after), part


def queued_by_deadline(
    in_time: float, arrived: float, pull_s: float, per_s: float, room_s: float
) -> tuple[float, float]:
    """Return the prompts that wait and can still be in time after a pull, and the newly late ones.

    Late ones give way (``events/dispatch_order.py``), so they cost the others nothing.
    """
    waiting = max(0.0, in_time + arrived - per_s * pull_s)
    late = max(0.0, waiting - per_s * room_s)
    return waiting - late, late


def late_by_chance(rate: float, per_s: float, room_s: float, unevenness: float, *, gives_way: bool) -> float:
    """Return the part of the requests that is late by chance, beyond what the fluid of their mean rate makes.

    ``rate`` and ``per_s`` are in prompts/s, come and computed. Where late prompts give way the queue of those
    in time is a Brownian motion reflected at 0 and at what is computed within the room; what the upper end
    reflects is late (Harrison, "Brownian motion and stochastic flow systems", 1985). Else it has no upper
    end, and all are late from a rate of ``per_s`` on. ``unevenness`` is 1 + cv^2 of the prompts' times.
    """
    if not rate:
        return 0.0
    drift, variance = abs(rate - per_s), rate + min(rate, per_s) * (unevenness - 1)
    room = max(1.0, per_s * room_s)
    power = min(2 * drift * room / variance, MOST_POWER)
    if not gives_way:
        return math.exp(-power) if rate < per_s else 1.0
    return min(1.0, (drift / math.expm1(power) if power > LEAST_POWER else variance / 2 / room) / rate)


def in_stages(decoding: Decoding, stages: int) -> Decoding:
    """Return the same requests, as far on in their answers, in that many stages."""
    known = len(decoding.requests)
    if known == stages:
        return decoding
    requests, sums = [0.0] * stages, [0.0] * stages
    for index, (number, step_ms) in enumerate(zip(decoding.requests, decoding.step_ms, strict=True)):
        requests[index * stages // known] += number
        sums[index * stages // known] += number * step_ms
    means = (total / number if number else 0.0 for total, number in zip(sums, requests, strict=True))
    return Decoding(tuple(requests), tuple(means), decoding.counted)


def decoded(
    before: Decoding, arrived: float, pull_s: float, workers: int, work: Work
) -> tuple[Decoding, float]:
    """Return what decodes after a pull, and the requests known in it to have too long an ITL.

    An answer is as slow as its mean step, which is known when it is complete. What finds no slot or KV cache
    waits, misses a target and is counted at once.
    """
    before = in_stages(before, work.stages)
    total, most = before.total, workers * work.most_at_once
    prompts_per_s = arrived / pull_s / workers if work.state.is_aggregated else 0.0
    step_ms = work.step_ms(min(total, most) / workers, prompts_per_s)
    life_s = max(work.state.answers.mean_steps * step_ms / 1000, 1e-9)
    is_full = total > most
    passed = pull_s * work.stages / life_s * (most / total if is_full else 1.0)
    left = math.exp(-passed)
    requests, means, coming, coming_ms = [], [], arrived, 0.0
    for index, (number, mean_ms) in enumerate(zip(before.requests, before.step_ms, strict=True)):
        both = number + coming
        stays = number * left + coming * (1 - left) / passed
        both_ms = (number * mean_ms + coming * coming_ms) / both if both else 0.0
        requests.append(stays)
        means.append(both_ms)
        coming, coming_ms = both - stays, (both_ms * index + step_ms) / (index + 1)
    new = arrived if is_full else 0.0
    all_counted = before.counted + new
    gone = coming * min(1.0, all_counted / (total + arrived)) if coming else 0.0
    is_slow = coming_ms > work.targets.itl_ms
    long = (coming - gone) * (1.0 if is_slow else long_by_chance(min(total, most), workers, work))
    return Decoding(tuple(requests), tuple(means), all_counted - gone), new + long


def long_by_chance(load: float, workers: int, work: Work) -> float:
    """Return the part of the requests whose ITL is too long by chance, while ``load`` decode.

    The number that decodes is Poisson, and its mean over the life of an answer has two thirds of that
    variance, or the workers' part of it where they take turns: normal from there.
    """
    if work.is_always_in_time:
        return 0.0
    batch = load / workers
    turns = workers if work.state.service.is_evenly_routed else 1
    deviation = math.sqrt(2 / 3 * batch / turns)
    apart = work.most_in_time - batch
    return 0.5 * math.erfc(apart / deviation / math.sqrt(2)) if deviation else float(apart < 0)
