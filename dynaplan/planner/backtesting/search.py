"""Backtest: the cheapest number of workers, standing still, that would have kept the promise lately.

The traffic of the last window is simulated (``dynaplan/simulation``) on splits of workers that stand still,
with the engines' model and the dispatch of the live service. No queueing theory, and nothing is fitted: what
is asked is what a user would try with ``dynaplan simulate``.

**Kept.** N requests came in the window, of which the part p may miss a target (1 - percentile / 100).

1. A split that is there, or that has more GPUs, keeps the promise when no more than N p requests miss.
2. One with fewer GPUs than there are must keep it beyond chance, as requests miss together (``chance.py``).
   By the score test of a proportion (Wilson, 1927) that is when no more than N p - z sqrt(N p (1 - p) effect)
   miss, z = 1.645: 95 of 100 such windows then keep it. So the margin is wide for few requests, and for few
   bursts; of fewer than ``min_requests`` (52 at 95 %) none may miss.
3. Neither counts when more than n p + z sqrt(n p (1 - p)) of the n requests of the last ten minutes miss:
   what has begun lately is a small part of an hour.

**Search.** From the last answer on, or from who is there where that does not keep the promise,

4. while it is not kept and GPUs are left: one worker more, of the role with which the run comes farther;
5. when it is kept: one worker fewer of either role, as long as it is still kept;
6. when all GPUs do not keep it: workers of one role for those of the other, while a point more are in time.

A run of 4 and 5 ends as soon as more have missed than may, which makes a failing split cheap: when nothing
changes, a search is one whole run and two that end early. Each goes on where the last search left it
(``runs.py``). Takes for granted that more workers of both roles are never worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.backtesting.chance import Z, allowed_misses, design_effect
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval
from dynaplan.planner.backtesting.intervals import RECENT_S
from dynaplan.planner.backtesting.record import ServedRecord
from dynaplan.planner.backtesting.runs import KeptRuns, SplitRun
from dynaplan.planner.model import WorkerLimits
from dynaplan.planner.sizing.limits import fit_budget, raise_to
from dynaplan.simulation.simulated_service import ServiceSettings

MAX_RUNS = 12
"""Splits that one search simulates; the next search continues where it ended."""

MIN_GAIN = 0.01
"""The part of the requests that an exchange must bring in time: less is not worth two changes."""


@dataclass(frozen=True)
class Trial:
    """One split on the window.

    ``in_time`` is the part of its requests that met both targets; at most that where the run ended early,
    after the part ``progress`` of the requests.
    """

    workers: PoolSizes
    gpus: int
    in_time: float
    is_kept: bool
    progress: float = 1.0

    @property
    def rank(self) -> tuple[bool, float, float]:
        """What is greater for the better split: kept, then how far it came, then how many were in time."""
        return self.is_kept, self.progress, self.in_time


@dataclass(frozen=True)
class Search:
    """One window, and what may be tried. ``may_miss`` is a part of the requests, 0 to 1.

    ``runs`` are those of the last search, which this one moves along.
    """

    service: ServiceSettings
    window: Sequence[DrawnInterval]
    may_miss: float
    present: PoolSizes
    limits: WorkerLimits
    runs: KeptRuns = field(default_factory=KeptRuns)
    record: ServedRecord = field(default_factory=ServedRecord)

    def __post_init__(self) -> None:
        self.runs.begin(self.service, self.window)

    @cached_property
    def requests(self) -> int:
        """The number of requests in the window."""
        return sum(each.count for each in self.window)

    @property
    def begin_s(self) -> float:
        return self.window[0].begin_s if self.window else 0.0


def find_cheapest(search: Search, begin: PoolSizes) -> tuple[Trial, tuple[Trial, ...]]:
    """Return the cheapest split that keeps the promise, else the one that comes nearest; and all tried."""
    return _Climb(search).find(begin)


class _Climb:
    """One search, with the result of each split that it has tried."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._limits = search.limits
        self._roles = sorted(
            search.service.gpus_per_worker, key=lambda role: -search.service.gpus_per_worker[role]
        )
        self._trials: dict[PoolSizes, Trial] = {}

    def find(self, begin: PoolSizes) -> tuple[Trial, tuple[Trial, ...]]:
        limits = self._limits
        begin = limits.cap(raise_to(begin, limits.least))
        if limits.gpus(begin) > limits.max_gpus:
            begin = fit_budget(begin, limits) or limits.least
        best = self._grow(self._try_present(self._try(begin)))
        if best.is_kept:
            best = self._shrink(best)
        elif len(self._trials) < MAX_RUNS:
            best = self._exchange(best)
        return best, tuple(self._trials.values())

    def _try(self, workers: PoolSizes, *, is_whole: bool = False) -> Trial:
        known = self._trials.get(workers)
        if known is None or (is_whole and known.progress < 1):
            known = self._trials[workers] = run(self._search, workers, is_whole=is_whole)
        return known

    def _fits(self, workers: PoolSizes) -> bool:
        limits = self._limits
        is_allowed = limits.cap(raise_to(workers, limits.least)) == workers
        return is_allowed and limits.gpus(workers) <= limits.max_gpus and len(self._trials) < MAX_RUNS

    def _try_present(self, best: Trial) -> Trial:
        """Try the present workers too, if the best split so far keeps nothing; return the better one."""
        larger = raise_to(best.workers, self._search.present)
        return self._try(larger) if not best.is_kept and self._fits(larger) else best

    def _grow(self, best: Trial) -> Trial:
        while not best.is_kept:
            larger = [each for role in self._roles if self._fits(each := best.workers.plus(role, 1))]
            if not larger:
                break
            best = max(map(self._try, larger), key=lambda each: each.rank)
        return best

    def _shrink(self, best: Trial) -> Trial:
        smaller = [each for role in self._roles if self._fits(each := best.workers.plus(role, -1))]
        for workers in smaller:
            if (tried := self._try(workers)).is_kept:
                return self._shrink(tried)
        return best

    def _exchange(self, best: Trial) -> Trial:
        """Give GPUs of one role to the other while more requests are in time; return the best split."""
        best = self._try(best.workers, is_whole=True)
        if len(self._roles) < 2:
            return best
        for larger, smaller in (self._roles, self._roles[::-1]):
            while True:
                after = best.workers.plus(larger, 1)
                while self._limits.gpus(after) > self._limits.max_gpus:
                    after = after.plus(smaller, -1)
                if not self._fits(after):
                    break
                tried = self._try(after, is_whole=True)
                if tried.in_time < best.in_time + MIN_GAIN:
                    break
                best = tried
        return best


def run(search: Search, workers: PoolSizes, *, is_whole: bool = False) -> Trial:
    """Simulate the window on a static split, until it is over or too many have missed.

    With ``is_whole`` it goes on to the end. A split with a record of its own is not simulated: what was
    measured counts, where it alone served all the time, and for enough of the requests.
    """
    gpus, count, arrived = search.limits.gpus(workers), search.requests, 0
    margin = -Z if gpus < search.limits.gpus(search.present) else 0.0
    if records := search.record.of_standing(workers, count):
        window, newest = records
        allowed = allowed_misses(window.requests, search.may_miss, margin, search.record.effect)
        is_kept = window.missed <= max(0.0, allowed)
        is_kept &= newest.missed <= allowed_misses(newest.requests, search.may_miss, Z)
        return Trial(workers, gpus, max(0.0, 1 - window.missed / window.requests), is_kept)
    at_most = max(0.0, allowed_misses(count, search.may_miss, margin))
    kept = course = search.runs.of(workers, search.begin_s)
    for interval in search.window:
        if interval.end_s > course.until_s:
            if course is kept and not interval.is_settled:
                course = kept.copy()
            course.serve(interval)
        arrived += interval.count
        if interval.end_s == course.until_s and arrived < count and not is_whole:
            missed = course.misses.since(search.begin_s).either
            if missed > at_most:
                return Trial(workers, gpus, 1 - missed / count, False, arrived / count)
    if course is kept:
        course = kept.copy()
    course.finish()
    simulated = course.misses.since(search.begin_s)
    held = search.record.held(workers, count, simulated)
    effect = design_effect([each.count for each in search.window], course.misses.by_interval(search.begin_s))
    is_kept = held <= max(0.0, allowed_misses(count, search.may_miss, margin, effect))
    is_kept = is_kept and _kept_lately(search, course, held - simulated.either)
    return Trial(workers, gpus, 1 - held / max(1, count), is_kept)


def _kept_lately(search: Search, course: SplitRun, more: float) -> bool:
    """Tell whether the newest requests keep the promise too.

    Of all requests ``more`` miss than were simulated, and of the newest their share of these.
    """
    end_s = search.window[-1].end_s if search.window else 0.0
    recent = [each for each in search.window if each.end_s > end_s - RECENT_S]
    came = sum(each.count for each in recent)
    missed = course.misses.since(recent[0].begin_s).either if recent else 0
    return missed + more * came / max(1, search.requests) <= allowed_misses(came, search.may_miss, Z)
