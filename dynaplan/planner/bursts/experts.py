"""Experts on how many workers to have: what each would have held lately, and which kept the promise.

For each split of a box's GPUs there are two: one stands still at it, one follows the forecast and is never
below it. The smallest that follows is *following alone*, the policy without a hedge. None is below what the
mean load of the window needs by the queueing model. Each interval all are run with the arrivals of its
metric pulls through the fluid model of ``standing.py``, whatever the real workers were. Workers that an
expert adds hold their GPUs at once and serve a start-up time later: that is the price of changing. With
dispatch by deadline late prompts give way to the others; else, and at aggregated workers, they keep the
order of arrival.

**Broken.** Bursts are few: late requests come together, and one crowd is no rule. With x(k) the requests of
an expert that missed a target in burst k, faded, R all requests and r the part that may miss,

    missed = sum x(k),  doubt = sqrt(sum x(k)^2)            the standard error of a compound Poisson sum
    broken     while missed - doubt > r R
    kept       while missed <= r R

A burst is a run of intervals in which more missed than r allows; what lasts longer than a start-up time and
an interval, in which help would have come, is another one.

**What is new** is followed by all: while the forecast needs more than it did in the window before, no
expert has been tried on what comes. What it needs counts as known once the time has passed that it is for.
Experts that stand still hold what they then ask for, but are tried without that help: what they miss the
first time they would miss the second time, when it is not new.

**Evidence.** What an expert missed is the fluid's word, corrected by what was counted with the workers that
served (``evidence.py``, ``lived.py``).

**Patience.** An expert that stands still waits for a burst to end until it has lasted for a start-up time,
as long as help takes, and follows from then on, until the forecast needs no more than it has. That is the
rule of the ski rental (Karlin and others, "Competitive randomized algorithms", 1990): waiting has cost no
more than twice what it would have cost had the length of the burst been known. Bursts have heavy tails, and
one that has lasted goes on for about as long again.

**Trust.** Trusted is one expert, following alone at first. It stays until it has broken the promise, or
until another one that kept it has held less over the window by the GPU-seconds of the whole box in a
start-up time and an interval, the most that a wrong size costs before it can be mended. From following to
standing still, which saves the changes to come, those of the GPUs count that it changes now. The next one is
the cheapest that kept the promise; where none did, the cheapest that is hardly worse than the best, as in
``standing.py``. One that stands still and has followed all the while is known to follow, and not to stand: so
one that follows, has held no more and missed fewer, and wants the same workers now, is trusted in its place.

**Bound.** So what is trusted has never held more than that cost above the cheapest expert that kept the
promise over the same window, and has missed no more than promised, but for the doubt, as far as the fluid is
right.

**Constants.** None of its own: promise, window, start-up time and interval are options, and one standard
error is the usual doubt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.interval import Arrived, fared
from dynaplan.planner.bursts.lived import lived_through, missed_more
from dynaplan.planner.bursts.memory import ExpertTrial, Hedge, Missed
from dynaplan.planner.model import WorkerLimits
from dynaplan.planner.sizing.limits import raise_to

MOST_TRIED = 64
"""The largest number of workers of a role that is tried."""


def _tried_numbers(least: int, most: int) -> list[int]:
    """Return all numbers up to 8, and above it those of three significant bits: 10, 12, 14, 16, 20, ..."""
    every = range(max(1, least), min(most, MOST_TRIED) + 1)
    return [number for number in every if number % 2 ** max(0, number.bit_length() - 3) == 0]


@dataclass(frozen=True)
class ExpertPanel:
    """The experts of a box, following alone first. ``limits`` have the GPUs of all of it."""

    limits: WorkerLimits
    is_aggregated: bool

    @cached_property
    def experts(self) -> list[tuple[Targets, bool]]:
        """The workers of each, and whether it follows."""
        limits, least = self.limits, self.limits.least
        most = limits.max_gpus // limits.prefill_gpus
        prefills = [0] if self.is_aggregated else _tried_numbers(least.prefill, most)
        decodes = _tried_numbers(least.decode, limits.max_gpus // limits.decode_gpus)
        every = [Targets(prefill, decode) for prefill in prefills for decode in decodes]
        splits = [split for split in every if limits.gpus(split) <= limits.max_gpus]
        return [(split, follows) for follows in (True, False) for split in splits]

    def trials(self, hedge: Hedge) -> list[ExpertTrial]:
        """Return the trials of these experts; one that is tried for the first time begins as the first."""
        known = {(each.workers, each.follows): each for each in hedge.trials}
        alone = known.get(self.experts[0], ExpertTrial())
        return [known.get(key, replace(alone, workers=key[0], follows=key[1])) for key in self.experts]


def wants(expert: ExpertTrial, wish: Targets, hedge: Hedge) -> Targets:
    """Return the workers that the expert wants while the forecast needs those of ``wish``."""
    goes_along = expert.follows or expert.chased_s or is_new(wish, hedge)
    return raise_to(expert.workers, wish if goes_along else hedge.least)


def is_new(wish: Targets, hedge: Hedge) -> bool:
    """Tell whether the forecast needs more than it ever did in the window before."""
    return raise_to(wish, hedge.most) != hedge.most


def followed(before: Hedge, wish: Targets, intervals: int, interval_s: float, window_s: float) -> Hedge:
    """Return the hedge that remembers what the forecast needs, for as many intervals as it is for.

    What drops out has come, and the experts have been tried on it. Of that the most is remembered, for one
    to two windows.
    """
    wishes = (*before.followed, wish)
    gone = wishes[: -1 - intervals]
    newest = raise_to(before.newest, gone[0]) if gone else before.newest
    most, newest_s = raise_to(before.most, newest), before.newest_s + interval_s
    if newest_s > window_s:
        most, newest, newest_s = newest, Targets(), 0.0
    return replace(before, followed=wishes[-1 - intervals :], most=most, newest=newest, newest_s=newest_s)


def tried(before: Hedge, panel: ExpertPanel, came: Arrived, targets: SlaTargets, fade: float) -> Hedge:
    """Return the hedge after an interval; sums fade by ``fade``."""
    before = replace(before, trials=tuple(panel.trials(before)))
    lived, came = lived_through(before, came, targets, fade)
    trials = []
    for trial, late, long in fared(before, came):
        gpus = panel.limits.gpus(wants(trial, before.followed[-1], before))
        chased_s, helped_s = _going_along_s(trial, before, came)
        trials.append(
            replace(
                trial,
                chased_s=chased_s,
                helped_s=helped_s,
                held_gpu_s=fade * trial.held_gpu_s + gpus * came.interval_s,
                late=missed_more(trial.late, late, targets.ttft_rest, came, fade),
                long=missed_more(trial.long, long, targets.itl_rest, came, fade),
            )
        )
    seconds = fade * before.seconds + came.interval_s
    return replace(
        before,
        trials=tuple(trials),
        seconds=seconds,
        requests=fade * before.requests + came.requests,
        lived=lived,
    )


def _going_along_s(trial: ExpertTrial, before: Hedge, came: Arrived) -> tuple[float, float]:
    """Return for how long an expert that stands still has gone along after the interval, and with help."""
    wish = before.followed[-1]
    if trial.follows or raise_to(trial.workers, wish) == trial.workers:
        return 0.0, 0.0
    lasts = trial.helped_s or max(trial.late.run_s, trial.long.run_s) >= came.startup_s
    goes_along = trial.chased_s or lasts or is_new(wish, before)
    return (
        trial.chased_s + came.interval_s if goes_along else 0.0,
        trial.helped_s + came.interval_s if lasts else 0.0,
    )


def over(missed: Missed, allowed: float, *, proven: bool) -> float:
    """Return how many more missed than allowed; ``proven``: beyond one standard error."""
    doubt = math.sqrt(missed.squares + missed.run**2) if proven else 0.0
    return max(0.0, missed.requests - doubt - allowed)


def chosen(
    hedge: Hedge, panel: ExpertPanel, targets: SlaTargets, worth_gpu_s: float, wish: Targets
) -> ExpertTrial:
    """Return the expert to trust from now on; ``worth_gpu_s`` is what a change of workers has to save."""
    may_be_late, may_be_long = (rest * hedge.requests for rest in (targets.ttft_rest, targets.itl_rest))

    def too_many(trial: ExpertTrial, *, proven: bool) -> float:
        late, long = (
            over(trial.late, may_be_late, proven=proven),
            over(trial.long, may_be_long, proven=proven),
        )
        return late + long

    trials = panel.trials(hedge)
    best = min(too_many(trial, proven=False) for trial in trials)
    hardly_worse = best + min(best, may_be_late)
    kept = [trial for trial in trials if too_many(trial, proven=False) <= hardly_worse]
    cheapest = min(kept, key=_in_order)
    now = next((each for each in trials if (each.workers, each.follows) == hedge.trusted), trials[0])
    saved_gpu_s = now.held_gpu_s - cheapest.held_gpu_s
    wanted, calmer = (wants(each, wish, hedge) for each in (now, cheapest))
    if now.follows and not cheapest.follows:
        changed = panel.limits.gpus(calmer) - panel.limits.gpus(wanted)
        worth_gpu_s *= abs(changed) / panel.limits.max_gpus
    if too_many(now, proven=True) > hardly_worse or saved_gpu_s > worth_gpu_s:
        return cheapest
    better = (
        each
        for each in kept
        if each.follows > now.follows
        and each.held_gpu_s <= now.held_gpu_s
        and _missed(each) < _missed(now)
        and wants(each, wish, hedge) == wanted
    )
    return min(better, key=_in_order, default=now)


def _in_order(trial: ExpertTrial) -> tuple[float, float, bool]:
    """Return the key that puts cheap experts first, then those with few misses, then calm ones."""
    return trial.held_gpu_s, _missed(trial), trial.follows


def _missed(trial: ExpertTrial) -> float:
    return trial.late.requests + trial.long.requests
