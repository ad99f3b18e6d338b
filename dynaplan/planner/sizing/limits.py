"""From enough workers to allowed ones: the search for the smallest number, minimums and the GPU budget.

**Search** for the smallest number that is enough, by doubling and halving instead of trying each. Assumes
that more workers are never worse. Both ways of sizing use it.

**Limits.** Within the budget everything wanted is allowed. Over it, each role first gets its minimum. Then
workers are added one by one to the role that has the smallest part of what it wants (allowed / wanted,
prefill at a tie) while they fit: the result never exceeds the budget, and both roles are short by about the
same factor.

Dynamo's planner scales both numbers and rounds (0.9.1), which exceeds the budget in some cases: 18 GPUs of
16 for 1 prefill worker of 2 GPUs and 4 decode workers of 4.
"""

from __future__ import annotations

from collections.abc import Callable

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.planner.model import DecisionStep, WorkerLimits

MAX_WORKERS = 4096
"""Workers at which the search gives up and returns this number; the GPU budget cuts it down afterwards."""

GROWTH = 2
"""Factor by which each step upwards exceeds the one before."""


def find_smallest(is_enough: Callable[[int], bool], least: int) -> int:
    """Find the smallest number of workers from ``least`` to ``MAX_WORKERS`` that is enough.

    ``MAX_WORKERS`` when none of them is. Doubles its steps until one is, then halves the last one.
    """
    low, high = least - 1, least
    while high < MAX_WORKERS and not is_enough(high):
        low, high = high, min(high + GROWTH * (high - low), MAX_WORKERS)
    high = min(high, MAX_WORKERS)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


UNBOUNDED_GPUS = 10**9
"""GPUs of a budget that bounds nothing: asks what a demand needs before asking whether it fits."""


def fit_budget(wanted: PoolSizes, limits: WorkerLimits) -> PoolSizes | None:
    """Return the fairest part of ``wanted`` that the budget allows, within the minimums and maximums.

    None when not even the minimums fit the budget.
    """
    wanted = limits.cap(raise_to(wanted, limits.least))
    if limits.gpus(wanted) <= limits.max_gpus:
        return wanted
    fitted = limits.cap(limits.least)
    if limits.gpus(fitted) > limits.max_gpus:
        return None
    while True:
        short = sorted(
            (role for role in SCALED_ROLES if fitted.of(role) < wanted.of(role)),
            key=lambda role: fitted.of(role) / wanted.of(role),
        )
        more = [fitted.plus(role, 1) for role in short]
        affordable = [workers for workers in more if limits.gpus(workers) <= limits.max_gpus]
        if not affordable:
            return fitted
        fitted = affordable[0]


def raise_to(wanted: PoolSizes, least: PoolSizes) -> PoolSizes:
    """Return the larger number for each role."""
    return PoolSizes(max(wanted.prefill, least.prefill), max(wanted.decode, least.decode))


def within_limits(
    wanted: PoolSizes, limits: WorkerLimits, current: PoolSizes
) -> tuple[PoolSizes, list[DecisionStep]]:
    """Return what is allowed of ``wanted``, with the steps of the decision's trail.

    That is ``current`` when minimums and budget exclude each other: nothing is changed then.
    """
    bounded = raise_to(wanted, limits.least)
    steps = []
    if bounded != wanted:
        steps.append(DecisionStep("minimum", wanted, bounded, f"at least {limits.least}"))
    if limits.cap(bounded) != bounded:
        capped = limits.cap(bounded)
        steps.append(
            DecisionStep(
                "maximum", bounded, capped, f"held to {capped}: the rest of the budget is for the other role"
            )
        )
        bounded = capped
    allowed, gpus = fit_budget(bounded, limits), limits.gpus(bounded)
    if allowed is None:
        needed = limits.gpus(limits.cap(limits.least))
        why = f"the minimums need {needed} GPUs, the budget has {limits.max_gpus}: change nothing"
        return current, [*steps, DecisionStep("budget", bounded, current, why)]
    if limits.max_gpus >= UNBOUNDED_GPUS:
        return allowed, steps
    if allowed == bounded:
        why = f"{gpus} GPUs are within the budget of {limits.max_gpus}"
    else:
        why = f"{gpus} GPUs are over the budget of {limits.max_gpus}: {limits.gpus(allowed)} can be used"
    return allowed, [*steps, DecisionStep("budget", bounded, allowed, why)]
