"""The queueing model: TTFT and ITL that a number of workers gives a demand, disaggregated or aggregated.

**Assumptions.** The service is in a steady state. Requests arrive at a constant mean rate. Their
burstiness is b, the index of dispersion: the variance over the mean of the number of arrivals in one metric
pull (option ``metric-pulling-interval``, 1 s unless set otherwise); 1 is Poisson. b is measured around the
mean of one adjustment interval, so a rate that drifts within it counts as bursts too, and bursts longer
than a pull are seen in part only. Sizing uses the recent mean of b (half-life 300 s), a finished
interval its own b; below 1, unknown, or from fewer than 5 pulls b is 1 (``measured_demand``).
The prefill pool also uses b at several time scales, which distinguishes batches of a clock from others
(``planner/forecasting/arrivals.py``).
Prompt and answer lengths are independent draws from the measured histograms. Workers of a role are alike;
their step times are those of the profile, times the corrections (``planner/backtesting/record.py``).

**Disaggregated.** The prefill pool is a multi-server queue with batches (``prefill_model.py``), each of c
decode workers the infinite-server model of ``decode_model.py`` with 1/c of the requests. The two are taken
to be independent, and

    TTFT = wait for a prefill worker + own prefill + transfer + 2.5 mean decode steps
    own prefill = fixed cost of a step + own (``workload.py``), as if the prompt were alone in its step
    transfer    = a fixed part (ms) + a part for each computed token of the prompt

The percentile of the TTFT comes from the distributions of the wait and of the prompt lengths; the transfer
of its tokens is part of a prompt's own time, the decode steps count with their mean. Where decode workers
take turns (round-robin) each gets every c-th request, which smooths bursts: b counts as b / c there, also
below 1. Where each request draws a worker at random it stays b, an upper bound: drawing thins bursts.

**Aggregated.** One pool does both: TTFT and ITL are those of ``decode_model.py`` with prompts, each worker
with 1/c of the requests. b or b / c counts in their ITL only: the wait of their prompts is taken for that of
Poisson arrivals at each worker, however requests are routed.

**Percentiles.** chance(time > limit) is computed directly; ``predict`` inverts it, upwards from the mean by
half again until the limit is kept, then by halving to 0.5 %.

**Sources.** Named where they are used; the steps are those of ``engines/timing_model/step_timing.py``, the
transfer is that of Dynamo's mocker. The combination is this project's own: Dynamo's planner works with means
(``formula.py``).

**Where it is wrong.** It knows no transients: a backlog after a surge lasts longer than the steady state
says (``look_ahead.py`` adds the prompts that wait). Requests that no engine can serve (longer than the
context) distort it when they are counted as demand. Measured errors stand in ``prefill_model.py`` and
``decode_model.py``.

**A finished interval** is its measured demand in the steady state (``measured_steady_state``). That assumes
that the interval was long against a request, so that its mean rate and lengths describe it. Its
rate is that of the requests that arrived, its lengths are those of the requests that were answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.engines.timing_model.step_timing import HAND_OFF_BASE_S, HAND_OFF_S_PER_TOKEN
from dynaplan.planner.forecasting.arrivals import dispersions_of
from dynaplan.planner.model import Demand, Prediction
from dynaplan.planner.sizing.queueing.decode_model import DecodeBatch
from dynaplan.planner.sizing.queueing.prefill_model import PrefillWaiting
from dynaplan.planner.sizing.queueing.workload import Answers, Prompts, WorkerKind, answers_of, prompts_of

TRANSFER_MS = 1000 * HAND_OFF_BASE_S
TRANSFER_MS_PER_TOKEN = 1000 * HAND_OFF_S_PER_TOKEN
"""A KV transfer: the fixed part, and that of each token of the prompt that was not cached."""

FIRST_TOKEN_STEPS = 2.5
"""Decode steps from a hand-off to the first token: half of the running one, the one that admits, its own."""

MIN_PER_MS = 1e-12
"""Lowest rate that is computed with, requests per ms (one in thirty years): no division by 0."""

MAX_MS = 3_600_000.0
"""Longest percentile that is searched for, ms (an hour); beyond it a time counts as infinite."""

PRECISION = 5e-3
"""Relative precision of the percentiles."""


@dataclass(frozen=True)
class QueueingModel:
    """The queueing model of one service, which is aggregated if ``prefill`` is None.

    ``is_evenly_routed``: requests go to decode workers round-robin, else to random ones.
    """

    decode: WorkerKind
    prefill: WorkerKind | None = None
    is_evenly_routed: bool = False

    def slowed(self, prefill_factor: float, decode_factor: float) -> QueueingModel:
        """Return the service whose steps take these times as long.

        An aggregated one takes ``decode_factor``.
        """
        return replace(
            self,
            decode=self.decode.slowed(decode_factor),
            prefill=self.prefill.slowed(prefill_factor) if self.prefill else None,
        )


class MeanTimes(NamedTuple):
    """Mean TTFT and ITL in ms, and the part of its time in which a worker computes prompts, 0 to 1."""

    mean_ttft_ms: float
    mean_itl_ms: float
    prefill_utilisation: float


class SteadyState:
    """One demand on one service in the steady state, for any number of workers.

    Numbers of workers are at least 1 of each role that the service has. Each pool is computed once.
    """

    def __init__(self, service: QueueingModel, demand: Demand) -> None:
        self.service = service
        self.demand = demand
        self._rate_per_ms = max(demand.requests_per_s / 1000, MIN_PER_MS)
        self._prefill_kind = service.prefill or service.decode
        self._prefill_pools: dict[int, PrefillWaiting] = {}
        self._decode_workers: dict[int, DecodeBatch] = {}

    @property
    def is_aggregated(self) -> bool:
        """True when the decode workers compute the prompts."""
        return self.service.prefill is None

    @cached_property
    def prompts(self) -> Prompts:
        """The time and the KV tokens that the prompts of this demand cost; computed once."""
        return prompts_of(self.demand, self._prefill_kind)

    @cached_property
    def answers(self) -> Answers:
        """The time and the KV tokens that the answers of this demand cost; computed once."""
        return answers_of(self.demand, self.service.decode)

    def prefill_waiting(self, workers: int) -> PrefillWaiting:
        if workers not in self._prefill_pools:
            self._prefill_pools[workers] = PrefillWaiting(
                self.prompts,
                self._prefill_kind,
                workers,
                self._rate_per_ms,
                self.demand.burstiness,
                self.demand.dispersions,
            )
        return self._prefill_pools[workers]

    def decode_batch(self, workers: int) -> DecodeBatch:
        """Return the steady state of one decode worker when ``workers`` of them share the demand."""
        if workers not in self._decode_workers:
            burstiness = self.demand.burstiness
            if self.service.is_evenly_routed:
                burstiness /= workers
            self._decode_workers[workers] = DecodeBatch(
                self.answers,
                self.prompts if self.is_aggregated else None,
                self.service.decode,
                self._rate_per_ms / workers,
                burstiness,
            )
        return self._decode_workers[workers]

    def chance_of_ttft_over(self, limit_ms: float, workers: PoolSizes) -> float:
        """Return the part of the requests whose TTFT exceeds ``limit_ms``, 0 to 1."""
        decoding = self.decode_batch(workers.decode)
        if self.is_aggregated:
            return decoding.chance_of_ttft_over(limit_ms)
        if decoding.overload:
            return 1.0
        room_ms = limit_ms - self._hand_off_ms(decoding)
        return self.prefill_waiting(workers.prefill).chance_over(room_ms, TRANSFER_MS_PER_TOKEN)

    def min_chance_of_ttft_over(self, limit_ms: float, decode_workers: int) -> float:
        """Return the part of the requests whose TTFT exceeds the limit even with unlimited prefill workers.

        No prompt waits then: its computing, the transfer and the decode steps remain.
        """
        decoding = self.decode_batch(decode_workers)
        if self.is_aggregated:
            return decoding.chance_of_ttft_over(limit_ms)
        room_ms = limit_ms - self._hand_off_ms(decoding)
        return self._without_waiting.chance_over(room_ms, TRANSFER_MS_PER_TOKEN)

    @cached_property
    def _without_waiting(self) -> PrefillWaiting:
        return PrefillWaiting(self.prompts, self._prefill_kind, 1, 0.0, 1.0)

    def mean_times(self, workers: PoolSizes) -> MeanTimes | None:
        """Return the mean times with that many workers; None when they are overloaded."""
        decoding = self.decode_batch(workers.decode)
        if decoding.overload:
            return None
        if self.is_aggregated:
            return MeanTimes(decoding.mean_ttft_ms, decoding.step_ms, decoding.prefill_share)
        prefill = self.prefill_waiting(workers.prefill)
        if prefill.is_overloaded:
            return None
        transfer_ms = self.prompts.mean_tokens * TRANSFER_MS_PER_TOKEN
        ttft_ms = prefill.mean_ms + self._hand_off_ms(decoding) + transfer_ms
        return MeanTimes(ttft_ms, decoding.step_ms, prefill.utilisation)

    def predict(self, workers: PoolSizes, targets: SlaTargets) -> Prediction:
        """Return times at the targets' percentiles, means and utilisation.

        Infinite times where overloaded.
        """
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
            percentile_ms(
                lambda ms: self.chance_of_ttft_over(ms, workers), targets.ttft_percentile, means.mean_ttft_ms
            ),
            percentile_ms(decoding.chance_of_itl_over, targets.itl_percentile, decoding.step_ms),
            means.mean_ttft_ms,
            means.mean_itl_ms,
            means.prefill_utilisation,
            decoding.kv_usage,
            decoding.batch,
        )

    def idle(self) -> SteadyState:
        """Return the same lengths at a rate of nearly 0: the times of a request that is alone."""
        return self.part(0.0)

    def part(self, factor: float) -> SteadyState:
        """Return the same lengths at ``factor`` times the rate."""
        part = SteadyState(self.service, self.demand.scaled(factor))
        part.prompts, part.answers = self.prompts, self.answers
        return part

    def _hand_off_ms(self, decoding: DecodeBatch) -> float:
        return TRANSFER_MS + FIRST_TOKEN_STEPS * decoding.step_ms


def percentile_ms(chance_over: Callable[[float], float], percent: float, guess_ms: float) -> float:
    """Return the ms that ``percent`` of the requests do not exceed; infinite above ``MAX_MS``.

    ``chance_over`` is the chance to exceed a time, ``guess_ms`` where the search begins.
    """
    allowed = 1 - percent / 100
    low_ms, high_ms = 0.0, guess_ms
    while chance_over(high_ms) > allowed:
        low_ms, high_ms = high_ms, 1.5 * high_ms
        if high_ms > MAX_MS:
            return math.inf
    while high_ms - low_ms > PRECISION * high_ms:
        middle_ms = (low_ms + high_ms) / 2
        if chance_over(middle_ms) > allowed:
            low_ms = middle_ms
        else:
            high_ms = middle_ms
    return high_ms


def measured_demand(traffic: Traffic) -> Demand | None:
    """Return the demand of a finished interval; None without requests, or where lengths are not known.

    Its burstiness b is ``Traffic.dispersion``: the variance over the mean of the arrivals between two metric
    pulls within the interval. Below 1 it counts as 1 (Poisson), for a few pulls show that by chance; so does
    an unknown one (fewer than 5 pulls, or Prometheus as the source).
    """
    isl, osl = traffic.isl, traffic.osl
    if not (traffic.requests and isl and osl and isl.total and osl.total):
        return None
    burstiness = max(1.0, traffic.dispersion or 1.0)
    hits = traffic.prefix_hit_rate or 0.0
    scales = dispersions_of(traffic.arrivals, traffic.interval_s)
    return Demand(traffic.requests / traffic.interval_s, isl, osl, hits, burstiness, scales)


def measured_steady_state(service: QueueingModel, traffic: Traffic, serving: PoolSizes) -> SteadyState | None:
    """Return the queueing model's view of a finished interval: its measured demand on that service.

    None if demand or lengths are not known, or if a role had no worker (``serving``).
    """
    demand = measured_demand(traffic)
    if demand is None or not serving.decode or (service.prefill and not serving.prefill):
        return None
    return SteadyState(service, demand)
