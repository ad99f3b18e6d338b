"""Early decisions (``adaptive-interval``): the signs that the end of the interval is too far away.

At every metric pull the interval so far is looked at, which costs next to nothing. A decision is made before
its end when one of two signs says that requests pay for the waiting, and that sign is new:

    wait   prompts that wait x seconds so far / prompts that left the queue so far      (Little's law)
    owed   requests that missed a target, less the promised part, less the error budget's rest

A sign counts where the wait exceeds the promised TTFT, or a request is owed; and it is new where it has
doubled since the last decision, so that a burst of any size is answered in a number of decisions that grows
with its logarithm, and a queue that only stands there is left to the end of the interval. Both are measured,
so no model is asked.

**The cost.** A decision is computing time. Early ones may take ``MOST_CPU`` of a core, so at least

    gap = cost / MOST_CPU        seconds lie between two decisions

where the cost is the CPU time of a decision, smoothed over the last ones (weight 1/8, as RFC 6298 smoothes
round-trip times), and ``USUAL_COST_S`` before one was measured. A gap as long as the interval leaves the
interval as it is. The virtual time of a simulation knows no CPU time: there the cost is always the usual one.

**The decision.** ``core/planning/deciding.py`` sizes for what came so far as it would at the end. An early
decision may only add workers: whether one can be spared is known at the end, and nothing is learnt before it.

**Where it is wrong.** Arrivals of a few seconds have more chance in them than those of an interval; a sign is
no forecast, so help comes a start-up time after the first queue at best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.domain.planning.observation import Sample
from dynaplan.domain.planning.sizing import ErrorBudget, SlaTargets
from dynaplan.domain.planning.traffic import Traffic

MOST_CPU = 0.01
"""Part of one core, 0 to 1, that early decisions may take: as much as a whole idle deployment with a planner
may (the aim in docs/benchmarks.md), so that planning never shows beside serving."""

USUAL_COST_S = 0.05
"""CPU time of a decision before one was measured, s: that of the queueing model with the predictor ``auto``
and a long history, the dearest of the usual ones (30 to 70 ms)."""

SMOOTHING = 1 / 8
"""Weight of the newest decision in the smoothed cost: RFC 6298's for round-trip times."""

NEW = 2.0
"""Factor by which a sign has to exceed that of the last decision: what has doubled is another situation."""


@dataclass(frozen=True)
class Signs:
    """The price of an interval so far: the wait of a prompt that comes now, s, and the requests owed."""

    wait_s: float = 0.0
    owed: float = 0.0


def signs(samples: Sequence[Sample], so_far: Traffic, budget: ErrorBudget, targets: SlaTargets) -> Signs:
    """Return the signs of an interval from its metric pulls, the oldest first, and its traffic so far."""
    return Signs(_wait_s(samples, so_far), _owed(so_far, budget, targets))


def reason(now: Signs, last: Signs, targets: SlaTargets) -> str:
    """Say why a decision should not wait, with the signs of the last one; "" where it may."""
    if 1000 * now.wait_s > targets.ttft_ms and now.wait_s >= NEW * last.wait_s:
        return f"a prompt that comes now waits for {now.wait_s:.3g} s"
    if now.owed >= 1 and now.owed >= NEW * last.owed:
        return f"{now.owed:.0f} requests more than promised have missed a target"
    return ""


def least_gap_s(cost_s: float) -> float:
    """Return the least time between two decisions of that CPU time, in seconds."""
    return cost_s / MOST_CPU


def smoothed_cost_s(before_s: float | None, cost_s: float) -> float:
    """Return the CPU time of a decision, s, after one more; the first stands for itself."""
    return cost_s if before_s is None else before_s + SMOOTHING * (cost_s - before_s)


def _wait_s(samples: Sequence[Sample], so_far: Traffic) -> float:
    """Return the time that a prompt waits which comes now, s; 0 without a queue."""
    if len(samples) < 2 or so_far.requests is None:
        return 0.0
    first, now = _waiting(samples[0]), _waiting(samples[-1])
    left = so_far.requests - (now - first)
    return now * so_far.interval_s / max(left, 1.0)


def _waiting(sample: Sample) -> float:
    """Return the requests before the workers: beyond one prompt for each that computes prompts."""
    return max(0.0, (sample.prefill_queue or 0.0) - sample.prefill_workers) + sample.waiting_requests


def _owed(so_far: Traffic, budget: ErrorBudget, targets: SlaTargets) -> float:
    """Return the requests that missed a target beyond what the budget allows; 0 where nobody counts them."""
    late = dict(so_far.over_ttft).get(targets.ttft_ms)
    long = dict(so_far.over_itl).get(targets.itl_ms)
    if not so_far.requests or late is None or long is None:
        return 0.0
    late -= so_far.requests * (1 - targets.ttft_percentile / 100) + budget.ttft_requests
    long -= so_far.requests * (1 - targets.itl_percentile / 100) + budget.itl_requests
    return max(0.0, late, long)
