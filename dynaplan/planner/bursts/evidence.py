"""Evidence: the fluid's misses beside the counted ones, with the workers that served.

The fluid is a model, and only one row of workers was ever lived. So it is run once more, with the workers
that served, whatever any expert wanted, and its misses are compared with what frontends counted
(``Traffic.over_ttft``, ``over_itl``). That corrects what each expert is held to have missed, twice.

**Bounds.** More workers never make a request wait longer. With C misses counted in an interval, an expert
with no more workers of either role than served would have missed the TTFT at least C times, one with no fewer
at most C times. For the ITL prefill counts the other way round: prompts that are computed later come to
decode more evenly. So an expert that had the very workers that served is held to what was counted. A bound
holds where the expert's queue (TTFT) or decoding requests (ITL), in the fluid, are to the same side of the
lived ones: a worker added during a burst finds what the burst has left.

**Ratio.** All others are held to the fluid's misses times rho. With F the fluid's misses of what was lived, C
the counted ones, both faded with the window, and D the doubt of F (bursts are few: the standard error of
``experts.py``; a request at least, since a fraction of one is none)

    rho = (C F + D^2) / (F^2 + D^2)

which minimises (C - rho F)^2 / D^2 + (rho - 1)^2: least squares drawn to 1, the fluid's own word, which is
believed to be wrong by a factor of about 2 unless evidence says otherwise. One burst counts half, ten count
ten elevenths.

An interval in which the workers changed is no evidence: it is not known which of them computed what. Nor is
one in which older workers still have more than newer ones (``lived.py``). Where
frontends count nothing, the misses that the error budget estimates from the mean times take the counted ones'
place (``planner/sizing/error_budget.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.memory import ExpertTrial, Lived, Missed

SAME = 1.0
"""Requests by which two numbers of waiting or decoding requests may differ and still count as the same."""

LEAST_DOUBT = 1.0
"""The least doubt of the fluid's misses, requests: they come whole, and the fluid has fractions of them."""


@dataclass(frozen=True)
class Counted:
    """The requests over the TTFT, and others over the ITL, of an interval in which ``workers`` served."""

    workers: Targets
    late: float
    long: float


@dataclass(frozen=True)
class Served:
    """The fewest and the most workers of each role that an expert had in an interval."""

    fewest: Targets
    most: Targets


def ratio(fluid: Missed, counted: float) -> float:
    """Return the factor rho by which the fluid's misses are multiplied."""
    doubt = max(LEAST_DOUBT**2, fluid.squares + fluid.run**2)
    return (counted * fluid.requests + doubt) / (fluid.requests**2 + doubt)


def late_by_evidence(late: float, had: Served, before: ExpertTrial, lived: Lived, came: Counted) -> float:
    """Return the late requests of an expert that had these workers and was in that state before."""
    late *= ratio(lived.trial.late, lived.late)
    queue, workers = lived.trial.queue, came.workers
    if _all(had.most, workers) and before.queue >= queue - SAME:
        late = max(late, came.late)
    if _all(workers, had.fewest) and before.queue <= queue + SAME:
        late = min(late, came.late)
    return late


def long_by_evidence(long: float, had: Served, before: ExpertTrial, lived: Lived, came: Counted) -> float:
    """Return the other requests over the ITL, likewise."""
    long *= ratio(lived.trial.long, lived.long)
    decoding, workers = lived.trial.decoding.total, came.workers
    is_below = had.most.decode <= workers.decode and had.fewest.prefill >= workers.prefill
    is_above = had.fewest.decode >= workers.decode and had.most.prefill <= workers.prefill
    if is_below and before.decoding.total >= decoding - SAME:
        long = max(long, came.long)
    if is_above and before.decoding.total <= decoding + SAME:
        long = min(long, came.long)
    return long


def _all(fewer: Targets, more: Targets) -> bool:
    return fewer.prefill <= more.prefill and fewer.decode <= more.decode
