"""The error budget: percentiles are promised over a window, so what went better than promised may be spent.

A promise of 95 % lets one request in twenty miss its target, in an hour as in a minute. Kept in every
single minute it pays for workers that are needed for a few minutes only; kept over the window it may let a
short rise pass. (The idea is that of Google's Site Reliability Engineering, 2016, chapter 3.)

**Symbols.** window: option ``slo-window``, s (3600 unless set otherwise; 0: no budget). P: percentile that is
promised. q: part of an interval's requests that missed.

**Balance.** For each target the budget counts the requests that could have missed it without breaking
the promise. After an interval of t seconds in which R requests arrived (the streamed ones, where that is
counted: of others nobody knows a TTFT, so they earn nothing),

    budget <- budget exp(-t / window) + R (1 - P / 100) - q R

so what is one window old counts 37 %. Below 0, too many missed. It starts at 0. Fading bounds it: a steady
rate earns up to rate x window x (1 - P / 100) without misses, and owes up to rate x window x P / 100 if all
miss.

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

**An account only**: it is shown, and worker counts follow from backtests over the same window, which are held
to what was missed (``planner/backtesting/record.py``).

**A restart** of the planner keeps the budget: it is read from the last record of the planner before, faded
by the time between (``planner/assembly.py``).

**Where it is wrong.** What waits is in R, and missed only once it is answered.
"""

from __future__ import annotations

import math

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.model import ErrorBudget
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, measured_steady_state


def missed_requests(
    service: QueueingModel, traffic: Traffic, serving: PoolSizes, targets: SlaTargets
) -> tuple[float, float] | None:
    """Return how many requests of an interval missed the TTFT target, and how many the ITL; None: not known.

    They are measured, or else estimated for ``serving``, the workers that served in the interval.
    """
    late = dict(traffic.over_ttft).get(targets.ttft_ms)
    long = dict(traffic.over_itl).get(targets.itl_ms)
    if late is not None and long is not None:
        return late, long
    shares, requests = missed_shares(service, traffic, serving, targets), traffic.requests
    return (requests * shares[0], requests * shares[1]) if shares and requests else None


def missed_shares(
    service: QueueingModel, traffic: Traffic, serving: PoolSizes, targets: SlaTargets
) -> tuple[float, float] | None:
    """Estimate the part of an interval's requests that missed the TTFT, and that of the ITL.

    None: not known.
    """
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
    """Return the budget after an interval: the past fades, and ``missed`` (TTFT, ITL) counts if known."""
    after = decay_budget(budget, traffic.interval_s, window_s)
    if not missed:
        return after
    requests = (traffic.requests if traffic.first_tokens is None else traffic.first_tokens) or 0.0
    ttft = requests * (1 - targets.ttft_percentile / 100) - missed[0]
    itl = requests * (1 - targets.itl_percentile / 100) - missed[1]
    return ErrorBudget(after.ttft_requests + ttft, after.itl_requests + itl)


def decay_budget(budget: ErrorBudget, passed_s: float, window_s: float) -> ErrorBudget:
    """Return the budget after that time, in which nothing is counted and the past fades."""
    fade = math.exp(-passed_s / window_s)
    return ErrorBudget(fade * budget.ttft_requests, fade * budget.itl_requests)


def describe_budget(budget: ErrorBudget) -> str:
    """Say for each target how many requests fewer, or more, than the promise allows have missed it lately."""
    ttft = _describe_target("TTFT", budget.ttft_requests)
    return f"error budget: {ttft}, {_describe_target('ITL', budget.itl_requests)}"


def _describe_target(name: str, requests: float) -> str:
    more = "more" if round(requests) < 0 else "fewer"
    return f"{abs(requests):.0f} requests {more} than promised missed the {name} lately"
