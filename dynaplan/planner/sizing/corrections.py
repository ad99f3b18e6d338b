"""Corrections of the queueing model: how much longer the engines' steps take than the profile says.

A factor per role multiplies the time of every step (``WorkerKind.slowed``), so 1.2 means steps of 1.2 times
the profile's. (``sizing: formula`` has factors of another meaning, ratios of latencies: ``formula.py``.)

What is compared must be steps, not queues: a backlog makes every TTFT long, however fast the engines are,
and a factor that grew with it would ask for ever more workers.

**Symbols.** D, ctx, f, m and S are those of ``decode_model.py``, F that of ``prefill_model.py``, all by the
uncorrected profile and for the lengths of the finished interval. x: measured mean ITL, ms. r: answers
finished per ms and decode worker. k: requests in a decode step, n of ``decode_model.py`` and one more.

**Decode.** By Little's law k = 1 + r E[S] x from measured quantities alone, in a backlog too, since r
counts finished answers, not arrivals (k at most the request slots, k ctx at most the KV cache). Then

    factor = x / D(k, k ctx)                                        decode only
    factor = x / (D(k, k ctx) + (1 - exp(-r x)) f + r x m)          aggregated

**Prompts in the steps** of aggregated workers have come lately, or have waited. An answer that ends in an
interval has lived beside those of a rise, of which few have ended so far. So there are two readings, with the
lesser and with the greater one of the rates of answers and of arrivals for r. And prompts that wait fill
every step: where the mean TTFT is over the target, a backlog as below, the second reading is

    factor = x / (D(k, k ctx) + f + max(r x, B) m),  B = (tokens of a step - k) / mean prompt tokens

A factor between both readings is no evidence against it, and stays; else the nearer of the two counts. The
first reading alone takes the queue of a burst for slow engines: 1.5 in the hours of ``tests/bench/cases.py``,
for engines that are as their profile.

**Bursts.** A request of a burst decodes beside more others than the mean rate of answers says, so D is too
short and the factor too large. So there is another reading, with the greater one of the rates of answers and
of arrivals (of a rise few answers have ended so far), times the unevenness: the rate of arrivals that a
request sees, over the mean rate. Two answers that begin t apart, each of life L, decode together for L - t.
So what a request sees is weighted by 1 - t / L, before it and after it: of a batch that comes at once it is
all of it. A factor between both readings is no evidence, as here and below. For prefill the demand is higher
where waiting is expected, by what prompts see within the TTFT target before them: none waits for a later one.

**Prefill.** The factor is the one with which the queueing model expects the measured mean TTFT. How much of
a TTFT was waiting is not known exactly, so there are two such factors, both from 0.5 to 3:

    alone          the solution z of   z (F + m) + transfer + 2.5 d D(1, ctx) = mean TTFT
    with waiting   the solution z of   wait(z) + z (F + m) + transfer + 2.5 d step = mean TTFT

d is the new decode factor; *step* the mean decode step at the measured demand, with d; wait(z) the mean
wait that the model expects at the measured demand when prefill steps take z times the profile's, so it is
that at the searched factor (infinite where the pool is overloaded with z). *Alone* takes all of the TTFT
for computing, the most that the factor can be, and *with waiting* the least. The measured factor is the old
one where it lies between both, for that is no evidence against it; else the nearer of the two.

**Prefill in a backlog.** Of prompts that wait long, both readings are too far apart to say anything, and a
mean TTFT over the target may be the queue of the interval before. The depth of the prefill queue says more:
the prompts that came, and those that are left, tell how many were computed. Further symbols:

    A    prompts that arrive per ms, from one metric pull to the next
    N    depth of the queue: prompts that wait, and those that workers compute
    P, H prefill workers, and the prompts that each holds at once (``max-concurrent-prefills``)
    s    prompts in the step of a worker that computes: N / P, at least 1, at most B of ``prefill_model.py``

With the step of s prompts, z (F + s m), the depth changes as that of a fluid queue, in which nothing is left
to chance (Kleinrock, Queueing Systems II, 1976, section 2.7):

    dN/dt = A - min(N, P s) / (z (F + s m))

It is followed from the depth at the interval's first pull on, with the arrivals of each later pull. The
factor is the z with which the mean of N at the later pulls is as measured. In a backlog that is right to some
per cent; below it the fluid waits for nobody, and z would be too large. So it is used where more than
P H + ``MIN_WAITING_PROMPTS`` were in the queue, at the first pull or in the mean of the later ones. For
engines as their profile (one worker, H = 4, 30 pulls) it was 0.97 to 1.01 in 197 intervals of constant loads,
of 83 to 104 % of what the pool can compute.

1. No mean TTFT: the prefill factor stays.
2. More are in the queue than that, and there is such a z within the bounds: z.
3. Else, the mean TTFT is over the target: it stays. Prompts may have waited in the interval before, or for
   decode workers, or nobody knows the depth at every pull, or no engine leaves such a queue.
4. Else: it stays between the two readings, and goes to the nearer one from outside.

Aggregated workers have no such queue: theirs is the decode factor only.

**Smoothing**: factor <- factor x (measured / factor)^0.2 after each interval, with 0.5 for 0.2 in case 2;
geometric, within 0.5 to 3. A factor between 1 / 1.15 and 1.15 counts as 1 (``effective_correction`` in
``planner/rules/sla_policy.py``); it is kept as it is. Nothing is corrected with fewer than 20 requests,
without lengths, with a role that had no worker, in an interval in which the numbers of workers changed, or
with ``no-correction``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.model import AverageLoad, Corrections, Demand
from dynaplan.planner.sizing.queueing.prefill_model import largest_batch
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState, measured_demand

MIN_REQUESTS = 20
"""Requests in an interval below which its mean says too little to correct anything."""

GAIN = 0.2
"""Exponent of one interval's correction: 0.2 goes most of the way (90 %) in ten intervals. A single
measurement is off by some per cent, and sizes must not follow that."""

BACKLOG_GAIN = 0.5
"""``GAIN`` for a factor by the depth of a backlog: such a measurement is more exact, and rare."""

MIN_FACTOR = 0.5
"""Lowest factor. A profile that is further off is that of another engine."""

MAX_FACTOR = 3.0
"""Highest factor, likewise."""

FACTOR_BISECTIONS = 7
"""Halvings of the range between ``MIN_FACTOR`` and ``MAX_FACTOR``, which find a factor to 1.4 %."""


FLUID_STEP_MS = 100.0
"""The longest steps in which a queue's depth is followed."""

MIN_WAITING_PROMPTS = 8
"""A backlog has more than so many prompts that wait, beyond those that workers hold. As many as 4 wait by
chance in the mean where one worker computes one prompt at a time at 90 % utilisation, and 9 at 95 %."""


@dataclass(frozen=True)
class _MeasuredInterval:
    """A finished interval: its traffic, its demand, and its load with the workers that served."""

    traffic: Traffic
    demand: Demand
    load: AverageLoad

    @property
    def serving(self) -> PoolSizes:
        return PoolSizes(self.load.prefill_workers, self.load.decode_workers)

    @property
    def answered_per_ms(self) -> float:
        """Answers per ms of one decode worker: answered, not arrived, which differ in a backlog."""
        lengths = self.traffic.osl
        answered = lengths.total if lengths and lengths.total else self.traffic.requests
        assert answered
        return answered / self.traffic.interval_s / 1000 / self.serving.decode

    @property
    def arrived_per_ms(self) -> float:
        return self.demand.requests_per_s / 1000 / self.serving.decode

    def is_over_ttft_target(self, targets: SlaTargets) -> bool:
        """Tell whether the mean TTFT is over the target: prompts may have waited all the time."""
        return (self.traffic.ttft_ms or 0.0) > targets.ttft_ms

    def unevenness_beside(self, life_s: float) -> float:
        """Return the rate of arrivals beside which requests of that life decode, over the mean rate.

        1 for a metronome, and where arrivals are not known by pull: requests of a burst see more of them.
        """
        arrivals = self.traffic.arrivals
        if not arrivals or not sum(arrivals):
            return 1.0
        width = max(1.0, life_s * len(arrivals) / self.traffic.interval_s)
        reach, seen = math.ceil(width) - 1, 0.0
        for pull, arrived in enumerate(arrivals):
            near = range(max(0, pull - reach), min(len(arrivals), pull + reach + 1))
            together = [1 - abs(pull - other) / width for other in near]
            beside = sum(arrivals[other] * part for other, part in zip(near, together, strict=True))
            seen += arrived * beside / sum(together)
        return max(1.0, seen / sum(arrivals) * len(arrivals) / sum(arrivals))

    def unevenness_within(self, within_s: float) -> float:
        """Return the rate of arrivals that a request sees in that time before it, over the mean rate."""
        arrivals = self.traffic.arrivals
        if not arrivals or not sum(arrivals):
            return 1.0
        width = max(1, min(len(arrivals), round(within_s * len(arrivals) / self.traffic.interval_s)))
        sums = [0.0, *accumulate(arrivals)]
        seen = sum(
            arrived * (sums[pull + 1] - sums[max(0, pull + 1 - width)]) / min(width, pull + 1)
            for pull, arrived in enumerate(arrivals)
        )
        return max(1.0, seen / sums[-1] * len(arrivals) / sums[-1])


def update_corrections(
    service: QueueingModel, before: Corrections, traffic: Traffic, load: AverageLoad, targets: SlaTargets
) -> tuple[Corrections, str]:
    """Return the factors after an interval with that traffic and load, and why.

    They stay as they were where the comparison would say more about queues than about engines.
    """
    demand = measured_demand(traffic)
    obstacle = _obstacle(service, traffic, demand, load)
    if obstacle or demand is None:
        return before, f"corrections stay at {_describe(before)}: {obstacle}"
    interval = _MeasuredInterval(traffic, demand, load)
    decode = _smooth(before.decode, _decode_factor(service, interval, before.decode, targets))
    if service.prefill is None:
        after, note = Corrections(before.prefill, decode), ""
    else:
        prefill, note = _correct_prefill(service.slowed(1.0, decode), interval, before.prefill, targets)
        after = Corrections(prefill, decode)
    return after, f"measured over expected: {_describe(after)}{note}"


def _obstacle(service: QueueingModel, traffic: Traffic, demand: Demand | None, load: AverageLoad) -> str:
    """Say why nothing can be compared, "" when it can."""
    if traffic.requests is None:
        return traffic.missing or "nothing was measured"
    is_known = demand and traffic.isl_tokens and traffic.osl_tokens
    if traffic.requests < MIN_REQUESTS or not is_known:
        return "there were too few requests"
    if not load.decode_workers or (service.prefill and not load.prefill_workers):
        return "not every role had workers"
    return ""


def _decode_factor(
    service: QueueingModel, interval: _MeasuredInterval, before: float, targets: SlaTargets
) -> float | None:
    """Return the factor nearest to ``before`` that agrees with the measured ITL; None without one."""
    itl_ms, state = interval.traffic.itl_ms, SteadyState(service, interval.demand)
    if not itl_ms or not state.answers.mean_steps:
        return None
    unevenness = interval.unevenness_beside(state.answers.mean_steps * itl_ms / 1000)
    answered, arrived = interval.answered_per_ms, interval.arrived_per_ms
    slow = _decode_ratio(state, itl_ms, min(answered, arrived) if state.is_aggregated else answered)
    waited = state.is_aggregated and interval.is_over_ttft_target(targets)
    fast = _decode_ratio(state, itl_ms, max(answered, arrived) * unevenness, is_full=waited)
    return min(max(before, fast), max(slow, fast))


def _decode_ratio(state: SteadyState, itl_ms: float, rate: float, *, is_full: bool = False) -> float:
    """Return measured over expected step time of decode workers that answer ``rate`` requests/ms each.

    ``is_full``: prompts that wait fill the steps of aggregated workers.
    """
    answers, kind = state.answers, state.service.decode
    batch = min(1 + rate * answers.mean_steps * itl_ms, float(kind.settings.request_slots))
    expected_ms = kind.decode_ms(batch, min(batch * answers.context_tokens, kind.kv_tokens))
    if state.is_aggregated:
        prompts, came, begins = state.prompts, rate * itl_ms, -math.expm1(-rate * itl_ms)
        if is_full:
            room = max(0.0, kind.settings.batched_tokens - batch) / max(prompts.mean_tokens, 1.0)
            came, begins = max(came, room), 1.0
        start_ms = max(0.0, prompts.fixed_ms - kind.decode_ms(1, 0.0))
        expected_ms += begins * start_ms + came * prompts.mean_ms
    return itl_ms / expected_ms


def _correct_prefill(
    service: QueueingModel, interval: _MeasuredInterval, before: float, targets: SlaTargets
) -> tuple[float, str]:
    """Return the smoothed prefill factor after the interval, and why it stays, if that is to be said."""
    ttft_ms = interval.traffic.ttft_ms
    if not ttft_ms:
        return before, ""
    if by_depth := _PrefillQueue(service, interval).find_factor():
        return _smooth(before, by_depth, BACKLOG_GAIN), ""
    if interval.is_over_ttft_target(targets):
        return before, f", prefill stays: a TTFT of {ttft_ms:.0f} ms is not explained by the prefill queue"
    busiest = interval.demand.scaled(interval.unevenness_within(targets.ttft_ms / 1000))
    with_waiting = _factor_by_ttft(ttft_ms, service, busiest, interval.serving)
    alone = _factor_by_ttft(ttft_ms, service, interval.demand.scaled(0.0), interval.serving)
    return _smooth(before, min(max(before, with_waiting), max(alone, with_waiting))), ""


def _factor_by_ttft(ttft_ms: float, service: QueueingModel, demand: Demand, serving: PoolSizes) -> float:
    """Return the slowdown of prefill, within the bounds, at which the model's mean TTFT is ``ttft_ms``.

    That is *with waiting* of the module, and *alone* for a demand of rate 0.
    """

    def is_too_low(factor: float) -> bool:
        times = SteadyState(service.slowed(factor, 1.0), demand).mean_times(serving)
        return times is not None and times.mean_ttft_ms < ttft_ms

    return _bisect_factor(is_too_low)


class _PrefillQueue:
    """The prefill queue of an interval as a fluid: *prefill in a backlog* of the module."""

    def __init__(self, service: QueueingModel, interval: _MeasuredInterval) -> None:
        assert service.prefill
        self._kind = service.prefill
        self._interval = interval
        self._prompts = SteadyState(service, interval.demand).prompts
        self._batch = largest_batch(self._prompts, self._kind)

    def find_factor(self) -> float | None:
        """Return z of the module; None where depths are unknown, too few wait, or z is out of bounds."""
        load, pulls = self._interval.load, len(self._interval.traffic.arrivals)
        first, mean = load.prefill_queue_first, load.prefill_queue
        if first is None or mean is None or load.pulls != pulls or pulls < 2:
            return None
        measured = (mean * pulls - first) / (pulls - 1)
        held = load.prefill_workers * self._kind.concurrent_prefills
        if max(first, measured) <= held + MIN_WAITING_PROMPTS:
            return None
        if not self._later_depth(first, MIN_FACTOR) < measured < self._later_depth(first, MAX_FACTOR):
            return None
        return _bisect_factor(lambda factor: self._later_depth(first, factor) < measured)

    def _later_depth(self, first: float, factor: float) -> float:
        """Return the mean depth at the later pulls, with steps that take ``factor`` times as long."""
        arrivals, depth, depths = self._interval.traffic.arrivals, first, []
        pull_ms = 1000 * self._interval.traffic.interval_s / len(arrivals)
        steps = math.ceil(pull_ms / FLUID_STEP_MS)
        for arrived in arrivals[1:]:
            for _ in range(steps):
                depth += arrived / steps
                depth -= min(depth, self._prompts_per_ms(depth) / factor * pull_ms / steps)
            depths.append(depth)
        return fmean(depths)

    def _prompts_per_ms(self, depth: float) -> float:
        """Return the prompts that the pool computes per ms at that depth, by the uncorrected profile."""
        workers, prompts = self._interval.serving.prefill, self._prompts
        batch = min(max(1.0, depth / workers), self._batch)
        return min(depth, workers * batch) / (prompts.fixed_ms + batch * prompts.mean_ms)


def _bisect_factor(is_too_low: Callable[[float], bool]) -> float:
    """Return the factor below which ``is_too_low`` holds, by halving on a logarithmic scale."""
    low, high = MIN_FACTOR, MAX_FACTOR
    for _ in range(FACTOR_BISECTIONS):
        middle = math.sqrt(low * high)
        if is_too_low(middle):
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def _smooth(before: float, measured: float | None, gain: float = GAIN) -> float:
    """Return the factor moved towards the measured one, within the bounds."""
    if measured is None:
        return before
    ratio: float = (measured / before) ** gain
    return min(max(before * ratio, MIN_FACTOR), MAX_FACTOR)


def _describe(corrections: Corrections) -> str:
    return f"prefill {corrections.prefill:.3g}, decode {corrections.decode:.3g}"
