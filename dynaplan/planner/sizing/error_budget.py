"""The error budget: percentiles are promised over a window, so what went better than promised may be spent.

A promise of 95 % lets one request in twenty miss its target, in an hour as in a minute. Kept in every
single minute it pays for workers that are needed for a few minutes only; kept over the window it may let a
short rise pass. (The idea is that of Google's Site Reliability Engineering, 2016, chapter 3.)

**Symbols.** window: option ``slo-window``, s (3600 unless set otherwise; 0: no budget, each interval keeps
the promise by itself). L: start-up time of a worker, s. T: adjustment interval, s. P: percentile that is
promised. q: part of an interval's requests that missed. rate: forecast of the coming interval, requests/s.

**Balance.** For each target the budget counts the requests that could have missed it without breaking
the promise. After an interval of t seconds in which R requests arrived,

    budget <- budget exp(-t / window) + R (1 - P / 100) - q R

so what is one window old counts 37 %. Below 0, too many missed. It starts at 0. Fading bounds it: a steady
rate earns up to rate x window x (1 - P / 100) without misses, and owes up to rate x window x P / 100 if all
miss. A debt buys no stricter promise, but nothing is spent until it is paid or has faded, and meanwhile it
holds workers.

**What missed**, q R. Frontends that know the targets count it (``Traffic.over_ttft``, ``over_itl``): at the
first token and at the end of an answer, so it may be more than came in the interval. Others report means,
and histograms too coarse for a tail. Then q is the queueing model's chance to exceed the target at the
measured demand and the uncorrected profile, with its distribution stretched until its mean is the measured
one:

    q = chance(time > target x expected mean / measured mean)

Where the model is overloaded only the mean is known: q = 1 over the target, else exp(-target / mean), an
exponential tail. Being modelled, q has no sampling noise, however small R. Requests without a first token
yet are in R but in no mean: their misses count when they are answered, by that interval's mean. Where
that needs requests, lengths, a mean TTFT or a worker of each role and has none, the interval only fades the
budget; without data it stays.

**Spending.** The part of the requests that may miss a target grows from 1 - P / 100 by

    spare = (budget - kept back) / (rate x time)       between 0 and 5 (1 - P / 100); rate x time at least 1

                  time                  kept back
    adding        L + T                 rate x L x min(1, L / 1800 s)
    removing      max(window, L + T)    0

*time* is what must pass before the decision can be amended: workers of the next decision serve after L +
T; a removed worker should not be wanted back within the window. With *adding* it is decided how many
workers there must be, with *removing* whether fewer would do (``planner/sizing/look_ahead.py``). *Kept back*
is the expected cost of a surge that no forecast announces, in requests that are late until help has started.

**Overspent.** Workers that left are the likeliest reason of a debt in traffic that comes in bursts. So while
more requests missed either target than promised (a debt of half a request or more), no worker leaves below
the number that, standing still, would have kept the promise over the window: the learnt floor. It adds no
GPU, for that is what the option ``learnt-floor`` does, debt or not; but those that there are go to the role
that lacked them (``planner/bursts/burst_floor.py``). When the debt is paid or has faded, what it held leaves
as any other worker.

**A restart** of the planner keeps the budget, and what floor and hedge have learnt: they are read from the
last record of the planner before, faded by the time between (``planner/assembly.py``).

**Where it is wrong.** The budget is spent on what is forecast: a forecast that was too low spends more than
was meant. What waits is in R, and missed only once it is answered.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.model import ErrorBudget
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, measured_steady_state

MAX_MISS_RATIO = 6.0
"""Largest multiple of the promised part of the requests that may miss for a while, however much is left."""

SURGE_INTERVAL_S = 1800.0
"""Assumed mean time between load surges that no forecast announced, s. During one, every request is late
until new workers have started. Of the 180 s worth of requests that a clean hour earns at 95 %, the reserve
is 2 s worth at a start-up of one minute, 32 at four, and all of it at 9.5 minutes."""


def missed_requests(
    service: ServiceModel, traffic: Traffic, serving: Targets, targets: SlaTargets
) -> tuple[float, float] | None:
    """Return the requests that missed the TTFT and the ITL target in an interval; None: not known.

    ``serving`` are the workers that served in the interval.
    """
    late = dict(traffic.over_ttft).get(targets.ttft_ms)
    long = dict(traffic.over_itl).get(targets.itl_ms)
    if late is not None and long is not None:
        return late, long
    shares, requests = missed_shares(service, traffic, serving, targets), traffic.requests
    return (requests * shares[0], requests * shares[1]) if shares and requests else None


def missed_shares(
    service: ServiceModel, traffic: Traffic, serving: Targets, targets: SlaTargets
) -> tuple[float, float] | None:
    """Estimate the parts of an interval's requests that missed either target; None: not known."""
    state = measured_steady_state(service, traffic, serving)
    if state is None or traffic.ttft_ms is None:
        return None
    expected, itl_ms = state.mean_times(serving), traffic.itl_ms or 0.0
    if expected is None:
        return _share_over_mean(traffic.ttft_ms, targets.ttft_ms), _share_over_mean(itl_ms, targets.itl_ms)
    ttft_limit_ms = targets.ttft_ms * expected.mean_ttft_ms / max(traffic.ttft_ms, 1e-9)
    itl_limit_ms = targets.itl_ms * expected.mean_itl_ms / max(itl_ms, 1e-9)
    return (
        state.chance_of_ttft_over(ttft_limit_ms, serving),
        state.decode_batch(serving.decode).chance_of_itl_over(itl_limit_ms),
    )


def _share_over_mean(mean_ms: float, limit_ms: float) -> float:
    """Return the part over a limit where only the mean is known: all, or an exponential tail."""
    if mean_ms >= limit_ms:
        return 1.0
    return math.exp(-limit_ms / mean_ms) if mean_ms > 0 else 0.0


def update_budget(
    budget: ErrorBudget,
    missed: tuple[float, float] | None,
    traffic: Traffic,
    targets: SlaTargets,
    window_s: float,
) -> ErrorBudget:
    """Return the budget after an interval in which these requests missed TTFT and ITL."""
    after = decay_budget(budget, traffic.interval_s, window_s)
    if not missed:
        return after
    requests = traffic.requests or 0.0
    ttft = requests * (1 - targets.ttft_percentile / 100) - missed[0]
    itl = requests * (1 - targets.itl_percentile / 100) - missed[1]
    kept_s = after.kept_s if min(ttft, itl) >= 0 else 0.0
    return ErrorBudget(after.ttft_requests + ttft, after.itl_requests + itl, kept_s)


def decay_budget(budget: ErrorBudget, passed_s: float, window_s: float) -> ErrorBudget:
    """Return the budget after some seconds without requests."""
    fade = math.exp(-passed_s / window_s)
    return ErrorBudget(fade * budget.ttft_requests, fade * budget.itl_requests, budget.kept_s + passed_s)


def is_overspent(budget: ErrorBudget, window_s: float) -> bool:
    """Tell whether more requests missed either target than promised, the last of them within the window.

    What is owed fades and never ends: after silence, a debt of 50 requests would be one for four windows.
    """
    is_owed = _is_owed(budget.ttft_requests) or _is_owed(budget.itl_requests)
    return is_owed and budget.kept_s <= window_s


def _is_owed(requests: float) -> bool:
    return round(requests) < 0


def targets_with_spare(
    budget: ErrorBudget,
    targets: SlaTargets,
    requests_per_s: float,
    within_s: float,
    startup_s: float = 0.0,
) -> SlaTargets:
    """Return the targets with the spare that spends the budget within ``within_s`` seconds.

    ``startup_s`` is the time until added workers serve: what a surge may cost meanwhile is kept back; 0
    keeps nothing back.
    """
    coming = max(requests_per_s * within_s, 1.0)
    kept_back = requests_per_s * startup_s * min(1.0, startup_s / SURGE_INTERVAL_S)

    def spare(left: float, percentile: float) -> float:
        return min(max((left - kept_back) / coming, 0.0), (MAX_MISS_RATIO - 1) * (1 - percentile / 100))

    return replace(
        targets,
        ttft_spare=spare(budget.ttft_requests, targets.ttft_percentile),
        itl_spare=spare(budget.itl_requests, targets.itl_percentile),
    )


def describe_budget(budget: ErrorBudget, spent: SlaTargets) -> str:
    """Say what is left of the budget, and which part of the requests may miss for now."""
    ttft = _describe_target("TTFT", budget.ttft_requests, spent.ttft_rest)
    return f"error budget: {ttft}; {_describe_target('ITL', budget.itl_requests, spent.itl_rest)}"


def _describe_target(name: str, requests: float, allowed: float) -> str:
    may_miss = f"{allowed:.0%} may miss it for now"
    if _is_owed(requests):
        return f"{-requests:.0f} requests more than promised missed the {name} lately, {may_miss}"
    return f"{max(requests, 0.0):.0f} requests fewer than promised missed the {name} lately, {may_miss}"
