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

**Evidence.** What an expert missed is the fluid's word, corrected by what was counted with the workers that
served (``evidence.py``).

**Patience.** An expert that stands still waits for a burst to end until it has lasted for a start-up time,
as long as help takes, and follows from then on, until the forecast needs no more than it has. That is the
rule of the ski rental (Karlin and others, "Competitive randomized algorithms", 1990): waiting has cost no
more than twice what it would have cost had the length of the burst been known. Bursts have heavy tails, and
one that has lasted goes on for about as long again.

**Trust.** Trusted is one expert, following alone at first. It stays until it has broken the promise, or
until another one that kept it has held less over the window by the GPU-seconds of the whole box in a
start-up time and an interval, the most that a wrong size costs before it can be mended. From following to
standing still it is enough to have held less: that saves the changes, too. The next one is the cheapest that
kept the promise; where none did, the cheapest that is hardly worse than the best, as in ``standing.py``.

**Bound.** So what is trusted has never held more than that cost above the cheapest expert that kept the
promise over the same window, and has missed no more than promised, but for the doubt, as far as the fluid is
right.

**Constants.** None of its own: promise, window, start-up time and interval are options, and one standard
error is the usual doubt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from dynaplan.core.routing.dispatching import DispatchRule
from dynaplan.core.sizing.fluid import (
    Work,
    decoded,
    late_by_chance,
    queued,
    queued_by_deadline,
)
from dynaplan.core.sizing.gpu_budget import at_least
from dynaplan.core.sizing.trials.evidence import Counted, Served, late_by_evidence, long_by_evidence
from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.sizing import (
    Decoding,
    ExpertTrial,
    Hedge,
    Lived,
    Missed,
    SlaTargets,
    WorkerLimits,
)
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.settings.routing import DisaggregationSettings

DISPATCH = DispatchRule(DisaggregationSettings.prefill_late_wait_s)
"""The rule by which late prompts that have waited for long take turns."""

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
    return at_least(expert.workers, wish if goes_along else hedge.least)


def is_new(wish: Targets, hedge: Hedge) -> bool:
    """Tell whether the forecast needs more than it ever did in the window before."""
    return at_least(wish, hedge.most) != hedge.most


def followed(before: Hedge, wish: Targets, intervals: int, interval_s: float, window_s: float) -> Hedge:
    """Return the hedge that remembers what the forecast needs, for as many intervals as it is for.

    What drops out has come, and the experts have been tried on it. Of that the most is remembered, for one
    to two windows.
    """
    wishes = (*before.followed, wish)
    gone = wishes[: -1 - intervals]
    newest = at_least(before.newest, gone[0]) if gone else before.newest
    most, newest_s = at_least(before.most, newest), before.newest_s + interval_s
    if newest_s > window_s:
        most, newest, newest_s = newest, Targets(), 0.0
    return replace(before, followed=wishes[-1 - intervals :], most=most, newest=newest, newest_s=newest_s)


@dataclass(frozen=True)
class Arrived:
    """An interval: the requests that came in each of its pulls, and their work; None where none came.

    ``by_deadline``: late prompts give way to the others. ``served`` are the workers at its end, ``counted``
    the misses with them; None where the workers changed.
    """

    interval_s: float
    startup_s: float
    requests: float = 0.0
    arrivals: Sequence[float] = ()
    work: Work | None = None
    by_deadline: bool = True
    served: Targets = field(default_factory=Targets)
    counted: Counted | None = None

    @property
    def pull_s(self) -> float:
        """The seconds of a metric pull."""
        return self.interval_s / len(self.arrivals)

    def serving(self, wishes: Sequence[int]) -> list[int]:
        """Return the workers that serve in each pull where these numbers were asked for, the newest last.

        A worker serves that was wanted all through the start-up time before.
        """
        backs = (
            math.ceil(max(0.0, self.startup_s - pull * self.pull_s) / self.interval_s)
            for pull in range(len(self.arrivals))
        )
        return [min(wishes[-1 - back :] if back < len(wishes) else wishes) for back in backs]


def tried(before: Hedge, panel: ExpertPanel, came: Arrived, targets: SlaTargets, fade: float) -> Hedge:
    """Return the hedge after an interval; sums fade by ``fade``."""
    before = replace(before, trials=tuple(panel.trials(before)))
    fared = _fared(before, came)
    lived = _lived(before, came, targets, fade)
    trials = []
    for trial, late, long in fared:
        gpus = panel.limits.gpus(wants(trial, before.followed[-1], before))
        trials.append(
            replace(
                trial,
                chased_s=_chased_s(trial, before, came),
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


def _fared(before: Hedge, came: Arrived) -> list[tuple[ExpertTrial, float, float]]:
    """Return each trial after the interval, with its requests over the TTFT, and over the ITL alone."""
    if came.work is None:
        return [(each.emptied(), 0.0, 0.0) for each in before.trials]
    return _Interval(before, came, came.work).fared()


def _lived(before: Hedge, came: Arrived, targets: SlaTargets, fade: float) -> Lived:
    """Return the fluid of the workers that served after the interval, beside what was counted."""
    lived, counted = before.lived, came.counted
    if not came.served.decode:
        return Lived()
    served = replace(lived.trial, workers=came.served, follows=False)
    alone = replace(before, trials=(served,), leasts=())
    [(trial, late, long)] = _fared(alone, replace(came, counted=None))
    late, long = (late, long) if counted else (0.0, 0.0)
    return Lived(
        replace(
            trial,
            late=missed_more(lived.trial.late, late, targets.ttft_rest, came, fade),
            long=missed_more(lived.trial.long, long, targets.itl_rest, came, fade),
        ),
        fade * lived.late + (counted.late if counted else 0.0),
        fade * lived.long + (counted.long if counted else 0.0),
    )


def _chased_s(trial: ExpertTrial, before: Hedge, came: Arrived) -> float:
    """Return for how long an expert that stands still has followed after the interval."""
    wish = before.followed[-1]
    if trial.follows or at_least(trial.workers, wish) == trial.workers:
        return 0.0
    lasts = max(trial.late.run_s, trial.long.run_s) >= came.startup_s
    goes_along = trial.chased_s or lasts or is_new(wish, before)
    return trial.chased_s + came.interval_s if goes_along else 0.0


def missed_more(before: Missed, missed: float, rest: float, came: Arrived, fade: float) -> Missed:
    """Return the misses after an interval in which these requests missed."""
    requests, squares = fade * before.requests + missed, fade**2 * before.squares
    if missed <= rest * came.requests:
        return Missed(requests, squares + before.run**2 + missed**2)
    run, run_s = before.run + missed, before.run_s + came.interval_s
    long_s = came.startup_s + came.interval_s
    if run_s // long_s > before.run_s // long_s:
        return Missed(requests, squares + run**2, 0.0, run_s)
    return Missed(requests, squares, run, run_s)


def over(missed: Missed, allowed: float, *, proven: bool) -> float:
    """Return how many more missed than allowed; ``proven``: beyond one standard error."""
    doubt = math.sqrt(missed.squares + missed.run**2) if proven else 0.0
    return max(0.0, missed.requests - doubt - allowed)


def chosen(hedge: Hedge, panel: ExpertPanel, targets: SlaTargets, worth_gpu_s: float) -> ExpertTrial:
    """Return the expert to trust from now on; ``worth_gpu_s`` is what a change has to save."""
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
    kept = (trial for trial in trials if too_many(trial, proven=False) <= hardly_worse)
    cheapest = min(
        kept, key=lambda trial: (trial.held_gpu_s, trial.late.requests + trial.long.requests, trial.follows)
    )
    now = next((each for each in trials if (each.workers, each.follows) == hedge.trusted), trials[0])
    saved_gpu_s = now.held_gpu_s - cheapest.held_gpu_s
    is_calmer = now.follows and not cheapest.follows
    if too_many(now, proven=True) > hardly_worse or saved_gpu_s > (0.0 if is_calmer else worth_gpu_s):
        return cheapest
    return now


class _Interval:
    """An interval that all experts are run through; those with the same prefill workers share their queue."""

    def __init__(self, before: Hedge, came: Arrived, work: Work) -> None:
        self._trials = before.trials
        self._came = came
        self._work = work
        self._least = [
            came.serving([each.decode for each in before.leasts or (Targets(),)]),
            came.serving([each.prefill for each in before.leasts or (Targets(),)]),
        ]
        self._lived = before.lived
        self._prompts_per_s = work.prompts_per_s
        self._room_s = work.room_s
        self._served = [
            came.serving([each.decode for each in before.followed]),
            came.serving([each.prefill for each in before.followed]),
        ]
        self._by_chance: dict[int, float] = {}
        self._queues: dict[tuple[object, ...], tuple[ExpertTrial, float, list[float]]] = {}

    def fared(self) -> list[tuple[ExpertTrial, float, float]]:
        """Return each trial after the interval, and its requests over the TTFT, and over the ITL alone."""
        return [self._fared(trial) for trial in self._trials]

    def _fared(self, trial: ExpertTrial) -> tuple[ExpertTrial, float, float]:
        workers, has_help = trial.workers.prefill or trial.workers.decode, self._has_help(trial)
        key = workers, has_help, trial.queue, trial.in_time, trial.late_s
        if key not in self._queues:
            self._queues[key] = self._queue(trial)
        queued, late, out = self._queues[key]
        decoding, long = self._decoding(trial, out)
        long *= 1 - min(1.0, late / self._came.requests)
        late, long = self._by_evidence(trial, late, long)
        queue, in_time, late_s = queued.queue, queued.in_time, queued.late_s
        return replace(trial, queue=queue, in_time=in_time, late_s=late_s, decoding=decoding), late, long

    def _by_evidence(self, trial: ExpertTrial, late: float, long: float) -> tuple[float, float]:
        """Return the misses of the interval, corrected by what was counted."""
        counted, lived = self._came.counted, self._lived
        if counted is None:
            return late, long
        decodes = self._serving(trial, Role.DECODE)
        prefills = self._serving(trial, Role.PREFILL) if trial.workers.prefill else [0]
        had = Served(Targets(min(prefills), min(decodes)), Targets(max(prefills), max(decodes)))
        late = late_by_evidence(late, had, trial, lived, counted)
        long = long_by_evidence(long, had, trial, lived, counted)
        late = min(late, self._came.requests)
        return late, min(long, self._came.requests - late)

    def _serving(self, trial: ExpertTrial, role: Role) -> list[int]:
        """Return the workers that serve in each pull; of an aggregated service the same for both roles."""
        is_prefill = role is Role.PREFILL and bool(trial.workers.prefill)
        number = trial.workers.prefill if is_prefill else trial.workers.decode
        served = self._served if self._has_help(trial) else self._least
        return [max(number, each) for each in served[is_prefill]]

    def _has_help(self, trial: ExpertTrial) -> bool:
        """Tell whether workers serve that were added because of the forecast."""
        return trial.follows or trial.chased_s > self._came.startup_s

    def _queue(self, trial: ExpertTrial) -> tuple[ExpertTrial, float, list[float]]:
        """Return the trial with its queue after the interval, its late prompts, and the computed ones."""
        queue, in_time, late_s, late, out = trial.queue, trial.in_time, trial.late_s, 0.0, []
        pull_s, room_s = self._came.pull_s, self._room_s
        gives_way = bool(trial.workers.prefill) and self._came.by_deadline
        target_s = self._work.targets.ttft_ms / 1000
        for arrived, workers in zip(self._came.arrivals, self._serving(trial, Role.PREFILL), strict=True):
            per_s = workers * self._prompts_per_s
            after, part = queued(queue, arrived, pull_s, per_s, room_s)
            late_s = late_s + pull_s if queue - in_time > 1 else 0.0
            left = 1 - DISPATCH.owed_share(late_s - target_s)
            in_time, over = queued_by_deadline(in_time, arrived, pull_s, left * per_s, room_s)
            chance = self._chance(workers, gives_way=gives_way)
            late += min(arrived, over + chance * arrived) if gives_way else max(part, chance) * arrived
            out.append(queue + arrived - after)
            queue = after
        return replace(trial, queue=queue, in_time=in_time, late_s=late_s), late, out

    def _chance(self, workers: int, *, gives_way: bool) -> float:
        """Return the part of the prompts that is late by chance."""
        if workers not in self._by_chance:
            came, per_s = self._came, workers * self._prompts_per_s
            rate = came.requests / came.interval_s
            self._by_chance[workers] = late_by_chance(
                rate, per_s, self._room_s, self._work.unevenness, gives_way=gives_way
            )
        return self._by_chance[workers]

    def _decoding(self, trial: ExpertTrial, came: Sequence[float]) -> tuple[Decoding, float]:
        pull_s, work = self._came.pull_s, self._work
        decoding, long = trial.decoding, 0.0
        serving = self._serving(trial, Role.DECODE)
        for arrived, workers in zip(came, serving, strict=True):
            decoding, missed = decoded(decoding, arrived, pull_s, workers, work)
            long += missed
        return decoding, long
