"""Minimums and the GPU budget: from the workers that are wanted to those that there may be."""

from __future__ import annotations

from dynaplan.domain.planning.scaling import SCALED_ROLES
from dynaplan.domain.planning.sizing import WorkerLimits
from dynaplan.domain.planning.targets import Step, Targets

UNBOUNDED = 10**9
"""GPUs of a budget that is none: first it is asked what a demand needs, then whether there is as much."""


def fit(wanted: Targets, limits: WorkerLimits) -> Targets | None:
    """The most of what is wanted that the budget allows, and no less than the minimums.

    Beyond the minimums the GPUs go to whichever role has the smaller part of what it wants, one worker after
    the other, prefill first where both have the same. Never more than the budget; None when not even the
    minimums fit it.
    """
    wanted = at_least(wanted, limits.least)
    if limits.gpus(wanted) <= limits.max_gpus:
        return wanted
    fitted = limits.least
    if limits.gpus(fitted) > limits.max_gpus:
        return None
    while True:
        short = sorted(
            (role for role in SCALED_ROLES if fitted.of(role) < wanted.of(role)),
            key=lambda role: fitted.of(role) / wanted.of(role),
        )
        more = [fitted.plus(role, 1) for role in short]
        affordable = [each for each in more if limits.gpus(each) <= limits.max_gpus]
        if not affordable:
            return fitted
        fitted = affordable[0]


def at_least(wanted: Targets, least: Targets) -> Targets:
    """The larger number for each role."""
    return Targets(max(wanted.prefill, least.prefill), max(wanted.decode, least.decode))


def limited(wanted: Targets, limits: WorkerLimits, current: Targets) -> tuple[Targets, list[Step]]:
    """What is wanted within the limits, and the steps there; ``current`` when they exclude each other."""
    enough = at_least(wanted, limits.least)
    steps = []
    if enough != wanted:
        steps.append(Step("minimum", wanted, enough, f"at least {limits.least}"))
    allowed, gpus = fit(enough, limits), limits.gpus(enough)
    if allowed is None:
        needed = limits.gpus(limits.least)
        why = f"the minimums need {needed} GPUs, the budget has {limits.max_gpus}: change nothing"
        return current, [*steps, Step("budget", enough, current, why)]
    if limits.max_gpus >= UNBOUNDED:
        return allowed, steps
    if allowed == enough:
        why = f"{gpus} GPUs are within the budget of {limits.max_gpus}"
    else:
        why = f"{gpus} GPUs are over the budget of {limits.max_gpus}: {limits.gpus(allowed)} of them"
    return allowed, [*steps, Step("budget", enough, allowed, why)]
