"""Time: how far ahead demand must be known, what is already on its way, and when a worker may go."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dynaplan.core.sizing.gpu_budget import UNBOUNDED, limited
from dynaplan.domain.planning.scaling import SCALED_ROLES
from dynaplan.domain.planning.sizing import Sizing, WorkerLimits
from dynaplan.domain.planning.targets import Step, Targets
from dynaplan.domain.planning.traffic import Demand


@dataclass(frozen=True)
class Lookahead:
    """The time that a decision is for: workers it adds serve from ``from_s`` on.

    Those of the next decision serve from ``until_s`` on, that is ``intervals`` from now, rounded up.
    """

    from_s: float
    until_s: float
    intervals: int


def lookahead(startup_s: float, interval_s: float) -> Lookahead:
    """How far ahead demand must be foretold, with workers that take so long to start."""
    until_s = max(0.0, startup_s) + interval_s
    return Lookahead(max(0.0, startup_s), until_s, math.ceil(until_s / interval_s))


def plan(
    size: Size,
    survive: Size,
    demands: Sequence[Demand],
    current: Targets,
    limits: WorkerLimits,
    headroom: float,
    now: Demand | None = None,
) -> Sizing:
    """The workers for all of these demands, which are foretold until ``until_s``.

    More workers as soon as one demand needs them. Fewer only as far as those who stay ``survive`` each of the
    demands, grown by ``headroom`` (a part of it): at the edge a worker would come and go in turns. And they
    must survive that of ``now``: a forecast is no reason to let go who is needed. Where all that is more than
    the GPU budget has, the demand that needs most is sized within it.
    """
    if not demands:
        why = "no data: change nothing, because no demand is known"
        return Sizing(current, (Step("demand", current, current, why),))
    unbounded = replace(limits, max_gpus=UNBOUNDED)
    each_wants = [size(each, unbounded) for each in demands]
    wanted = _most(each_wants, limits)
    if any(wanted.targets.of(role) < current.of(role) for role in SCALED_ROLES):
        borne = [each.times(1 + headroom) for each in demands] + ([now] if now else [])
        grown = _most([survive(each, unbounded) for each in borne], limits)
        wanted = _with_survivors(wanted, grown, current, headroom)
    if limits.gpus(wanted.targets) <= limits.max_gpus:
        _, bounds = limited(wanted.targets, limits, current)
        return replace(wanted, steps=(*wanted.steps, *bounds))
    most = max(range(len(demands)), key=lambda number: limits.gpus(each_wants[number].targets))
    return size(demands[most], limits)


Size = Callable[[Demand, WorkerLimits], Sizing]
"""Tells the workers that a demand needs within limits."""


def _with_survivors(wanted: Sizing, grown: Sizing, current: Targets, headroom: float) -> Sizing:
    """Who leaves must not be needed by the grown demand either."""
    after, reasons = wanted.targets, []
    for role in SCALED_ROLES:
        stay = min(current.of(role), max(after.of(role), grown.targets.of(role)))
        if stay > after.of(role):
            reasons.append(f"{stay} {role.value} workers stay, not {after.of(role)}")
            after = after.plus(role, stay - after.of(role))
    why = f"now, or with {headroom:.0%} more requests, " + ("; ".join(reasons) or "those who stay would do")
    prediction = wanted.prediction if after == wanted.targets else None
    return Sizing(after, (*wanted.steps, Step("survivors", wanted.targets, after, why)), prediction)


def _most(sizings: Sequence[Sizing], limits: WorkerLimits) -> Sizing:
    """The most of each role; the story is that of whoever needs most GPUs, as near as counts tell."""
    chosen = max(sizings, key=lambda each: limits.gpus(each.targets))
    most = Targets(
        max(each.targets.prefill for each in sizings), max(each.targets.decode for each in sizings)
    )
    if most == chosen.targets:
        return chosen
    step = Step("together", chosen.targets, most, f"another of the {len(sizings)} demands needs more")
    return Sizing(most, (*chosen.steps, step))
