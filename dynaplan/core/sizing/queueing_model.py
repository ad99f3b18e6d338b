"""What a number of workers makes of a demand, by the queueing model, disaggregated or aggregated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dynaplan.core.engine.hand_off import HAND_OFF_BASE_S, HAND_OFF_S_PER_TOKEN
from dynaplan.core.sizing.decode_model import DecodeBatch
from dynaplan.core.sizing.prefill_model import PrefillWaiting
from dynaplan.core.sizing.workload import Answers, Prompts, WorkerKind, answers_of, prompts_of
from dynaplan.domain.planning.sizing import Prediction, SlaTargets
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Demand

FIRST_TOKEN_STEPS = 2.5
"""Decode steps from a hand-off to the first token: the rest of one, the one that admits it, and its own."""

LEAST_PER_MS = 1e-12
"""Fewer requests count as so many, one in thirty years: the smallest numbers would divide badly."""

LONGEST_MS = 3_600_000.0
PRECISION = 5e-3
"""Relative, of the percentiles."""


@dataclass(frozen=True)
class ServiceModel:
    """What the workers of a service are like; without a prefill kind it is aggregated.

    ``is_evenly_routed`` says that decode workers take turns (round-robin), so that none gets several requests
    in a row; without it they come to each as they happen to. A hand-off takes ``transfer_ms`` and so much
    more for each token of the prompt; by default as simulations count it.
    """

    decode: WorkerKind
    prefill: WorkerKind | None = None
    is_evenly_routed: bool = False
    transfer_ms: float = 1000 * HAND_OFF_BASE_S
    transfer_ms_per_token: float = 1000 * HAND_OFF_S_PER_TOKEN

    def slowed(self, prefill_factor: float, decode_factor: float) -> ServiceModel:
        """The same with steps that take that many times as long; aggregated workers by the second factor."""
        return replace(
            self,
            decode=self.decode.slowed(decode_factor),
            prefill=self.prefill.slowed(prefill_factor) if self.prefill else None,
        )


class MeanTimes(NamedTuple):
    """Mean times in ms, and the part of its time that who computes prompts does so."""

    mean_ttft_ms: float
    mean_itl_ms: float
    prefill_utilisation: float


class SteadyState:
    """One demand on one service: asks what any number of workers would make of it."""

    def __init__(self, service: ServiceModel, demand: Demand) -> None:
        self.service = service
        self.demand = demand
        self._rate_per_ms = max(demand.requests_per_s / 1000, LEAST_PER_MS)
        self._prefill_kind = service.prefill or service.decode
        self._queues: dict[int, PrefillWaiting] = {}
        self._decodings: dict[int, DecodeBatch] = {}

    @property
    def is_aggregated(self) -> bool:
        """Whether the decode workers compute the prompts."""
        return self.service.prefill is None

    @cached_property
    def prompts(self) -> Prompts:
        """What the prompts cost."""
        return prompts_of(self.demand, self._prefill_kind)

    @cached_property
    def answers(self) -> Answers:
        """What the answers cost."""
        return answers_of(self.demand, self.service.decode)

    def prefill_waiting(self, workers: int) -> PrefillWaiting:
        """The prefill pool with so many workers."""
        if workers not in self._queues:
            self._queues[workers] = PrefillWaiting(
                self.prompts, self._prefill_kind, workers, self._rate_per_ms, self.demand.burstiness
            )
        return self._queues[workers]

    def decode_batch(self, workers: int) -> DecodeBatch:
        """One of so many decoding workers."""
        if workers not in self._decodings:
            burstiness = self.demand.burstiness
            if self.service.is_evenly_routed:
                burstiness /= workers
            self._decodings[workers] = DecodeBatch(
                self.answers,
                self.prompts if self.is_aggregated else None,
                self.service.decode,
                self._rate_per_ms / workers,
                burstiness,
            )
        return self._decodings[workers]

    def chance_of_ttft_over(self, limit_ms: float, workers: Targets) -> float:
        """The part of the requests whose TTFT is longer than that."""
        decoding = self.decode_batch(workers.decode)
        if self.is_aggregated:
            return decoding.chance_of_ttft_over(limit_ms)
        if decoding.overload:
            return 1.0
        room_ms = limit_ms - self._hand_off_ms(decoding)
        return self.prefill_waiting(workers.prefill).chance_over(room_ms, self.service.transfer_ms_per_token)

    def least_chance_of_ttft_over(self, limit_ms: float, decode_workers: int) -> float:
        """The same with as many prefill workers as one could want: nobody queues for one."""
        decoding = self.decode_batch(decode_workers)
        if self.is_aggregated:
            return decoding.chance_of_ttft_over(limit_ms)
        room_ms = limit_ms - self._hand_off_ms(decoding)
        return self._no_queue.chance_over(room_ms, self.service.transfer_ms_per_token)

    @cached_property
    def _no_queue(self) -> PrefillWaiting:
        return PrefillWaiting(self.prompts, self._prefill_kind, 1, 0.0, 1.0)

    def mean_times(self, workers: Targets) -> MeanTimes | None:
        """Means, and how busy who computes prompts is, with at least one of each; None: it is too much."""
        decoding = self.decode_batch(workers.decode)
        if decoding.overload:
            return None
        if self.is_aggregated:
            return MeanTimes(decoding.mean_ttft_ms, decoding.step_ms, decoding.prefill_share)
        queue = self.prefill_waiting(workers.prefill)
        if queue.is_overloaded:
            return None
        transfer_ms = self.prompts.mean_tokens * self.service.transfer_ms_per_token
        ttft_ms = queue.mean_ms + self._hand_off_ms(decoding) + transfer_ms
        return MeanTimes(ttft_ms, decoding.step_ms, queue.utilisation)

    def predict(self, workers: Targets, targets: SlaTargets) -> Prediction:
        """Times at the targets' percentiles, means, and how busy workers are; at least one of each."""
        decoding, means = self.decode_batch(workers.decode), self.mean_times(workers)
        if means is None:
            busy = (
                decoding.prefill_share
                if self.is_aggregated
                else self.prefill_waiting(workers.prefill).utilisation
            )
            overload = decoding.overload or "prompts come faster than they are computed"
            never = math.inf
            return Prediction(never, never, never, never, busy, decoding.kv_usage, decoding.batch, overload)
        return Prediction(
            _percentile(
                lambda ms: self.chance_of_ttft_over(ms, workers), targets.ttft_percentile, means.mean_ttft_ms
            ),
            _percentile(decoding.chance_of_itl_over, targets.itl_percentile, decoding.step_ms),
            means.mean_ttft_ms,
            means.mean_itl_ms,
            means.prefill_utilisation,
            decoding.kv_usage,
            decoding.batch,
        )

    def idle(self) -> SteadyState:
        """Next to no demand, of the same lengths: what a request gets that is alone."""
        return self.part(0.0)

    def part(self, factor: float) -> SteadyState:
        """So many times the requests, of the same lengths."""
        part = SteadyState(self.service, self.demand.times(factor))
        part.prompts, part.answers = self.prompts, self.answers
        return part

    def _hand_off_ms(self, decoding: DecodeBatch) -> float:
        return self.service.transfer_ms + FIRST_TOKEN_STEPS * decoding.step_ms


def _percentile(chance_over: Callable[[float], float], percent: float, guess_ms: float) -> float:
    """The time that all but the rest of the requests stay below."""
    rest = 1 - percent / 100
    low_ms, high_ms = 0.0, guess_ms
    while chance_over(high_ms) > rest:
        low_ms, high_ms = high_ms, 1.5 * high_ms
        if high_ms > LONGEST_MS:
            return math.inf
    while high_ms - low_ms > PRECISION * high_ms:
        middle_ms = (low_ms + high_ms) / 2
        if chance_over(middle_ms) > rest:
            low_ms = middle_ms
        else:
            high_ms = middle_ms
    return high_ms
