"""What the model says of the workers that served, beside what happened: it is held to its own record.

A backtest believes a model. So before it tries any split, what stood in the window is simulated as it stood:
the same arrivals, the workers that served in each interval (a change is in the middle of the interval that
ends with other numbers), counted as frontends count. It differs from what was measured by the model's error
and by chance alone: scarcity, backlogs and late workers are in both.

**Refit.** The steps of a role take z times as long as the model says. z is the factor at which the replayed
mean ITL (decode workers, and aggregated ones) or the mean TTFT (prefill workers) of the last ten minutes is
the measured one: the weighted median of log(measured / replayed) over intervals is 0, so a backlog of half of
the time moves nothing. A factor whose replay is within ``TOLERANCE`` stays: chance and histograms are no more
exact. Else z is moved by that ratio within a shrinking bracket, and halves it where it would leave it; a
step's time is nearly proportional to z, so that two replays do, but for backlogs. What was learnt from the
engines' own counters needs no factor. The ten minutes before are replayed too, to begin with the requests
that were there.

**Held to the record.** Over the window n requests came, of which m missed a target and the refitted model
foretold f. Two proportions differ beyond chance (p = (m + f) / 2 n) when

    (m - f) / sqrt(2 n p (1 - p)) > Z

Misses come together, so the variance under the root is at least the spread of m - f between parts of the
window (``chance.py``). Then what any split misses of that target is shifted by the same odds: logit(q) +
logit(m / n) - logit(f / n). More than was foretold is held against every split; less is not counted in favour
of one, because splits with fewer workers have no record.

**What stood for a part of the time** is compared in its own intervals, and the replay has the backlog that it
took over. Where it missed more than foretold there, beyond chance, neither it nor a split with no more
workers of either role is said to miss less than it did. Odds alone do not say that: of a split without a
simulated miss they are 0.

**What stood all the time** needs no model: its measured misses count in place of simulated ones, where they
are of ``MIN_COMPARED`` of the requests at least: few of them say nothing when most are not streamed.

**Where it is wrong.** The odds of one split are those of another one only if the model errs alike on both.
A worker that served for part of an interval counts for half of it. What was missed counts in the interval in
which it ended, here and there; requests that were there before the window are missing in the replay's first
minutes, so what came within an answer's life of its beginning is not compared. Of requests that were not
streamed nobody knows the TTFT: they are in neither count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import sub

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.chance import Z, design_effect, variance_of_sum
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval
from dynaplan.planner.backtesting.intervals import RECENT_S, Interval
from dynaplan.planner.backtesting.runs import KeptRuns, Misses
from dynaplan.planner.model import Corrections, SplitRecord
from dynaplan.planner.sizing.limits import raise_to
from dynaplan.simulation.simulated_service import ServiceSettings

TOLERANCE = 1.1
"""The ratio of measured and replayed means within which a factor stays."""

PRECISION = 1.03
"""The ratio at which the search for a factor ends."""

MAX_REPLAYS = 6
"""Replays of one search for a factor."""

FACTORS = (0.25, 4.0)
"""The least and the greatest factor: a model that is further off is that of another engine."""

MEANS = {Role.DECODE: "itl_ms", Role.PREFILL: "ttft_ms"}
"""The mean time that tells the factor of a role."""

ORDER = (Role.DECODE, Role.PREFILL, Role.DECODE)
"""How factors are found: prompts that are computed too fast come too many at once, and slow decoding down."""

MIN_COMPARED = 0.5
"""The part of the window's requests that a record must be of at least to stand in place of a simulation."""


@dataclass(frozen=True)
class DrawnWindow:
    """The intervals of a window, and the requests that are drawn for each."""

    drawn: Sequence[DrawnInterval]
    intervals: Sequence[Interval]

    def newest(self, within_s: float) -> DrawnWindow:
        """Return the intervals that began in the last ``within_s`` seconds, at least the newest one."""
        begins_s = (each.begin_s for each in self.drawn[:-1])
        first = sum(self.drawn[-1].end_s - begin_s > within_s for begin_s in begins_s) if self.drawn else 0
        return DrawnWindow(self.drawn[first:], self.intervals[first:])


@dataclass(frozen=True)
class ServedRecord:
    """The record of each split that served in the window, the last one first, and the shifts for all.

    ``newest`` is the record of the last ten minutes, where the same workers served all the time; else None.
    The shifts are logarithms of odds, at least 0: by so much more of the requests miss a target than is
    simulated. ``worse`` are the splits that missed more than foretold, and the parts of their requests that
    missed the TTFT and the ITL, 0 where foretold. ``effect`` is the design effect of the measured misses.
    """

    splits: tuple[SplitRecord, ...] = ()
    newest: SplitRecord | None = None
    ttft_shift: float = 0.0
    itl_shift: float = 0.0
    worse: tuple[tuple[PoolSizes, float, float], ...] = ()
    effect: float = 1.0

    def of_standing(self, workers: PoolSizes, requests: float) -> tuple[SplitRecord, SplitRecord] | None:
        """Return the records of these workers, of the window and its end.

        None if others served too, or when they are of too few of the window's ``requests``.
        """
        if not self.newest or self.splits[0].workers != workers:
            return None
        is_enough = self.splits[0].requests >= max(1.0, MIN_COMPARED * requests)
        return (self.splits[0], self.newest) if is_enough else None

    def held(self, workers: PoolSizes, requests: int, simulated: Misses) -> float:
        """Return how many of the requests miss a target: those ``simulated``, and more by the record."""
        if not requests:
            return 0.0
        late = _shifted(simulated.ttft / requests, self.ttft_shift)
        long = _shifted(simulated.itl / requests, self.itl_shift)
        for others, least_late, least_long in self.worse:
            if raise_to(workers, others) == others:
                late, long = max(late, least_late), max(long, least_long)
        more = requests * (late + long) - simulated.ttft - simulated.itl
        return min(requests, simulated.either + more)


def _shifted(part: float, shift: float) -> float:
    odds = math.exp(shift) * part
    return odds / (odds + 1 - part)


def simulate_served(
    service: ServiceSettings, window: DrawnWindow, runs: KeptRuns | None = None
) -> list[Traffic]:
    """Simulate the workers that served in each interval; return what frontends would have counted in each."""
    runs = runs or KeptRuns()
    runs.begin(service, window.drawn)
    return runs.simulate_served(window.drawn, [each.serving for each in window.intervals])


# -- refit ------------------------------------------------------------------------------------------------

Build = Callable[[Corrections], ServiceSettings]
"""Makes the simulated service whose steps take that many times as long."""


def hold_to_record(
    build: Build,
    window: DrawnWindow,
    before: Corrections,
    fitted: Sequence[Role],
    runs: KeptRuns | None = None,
) -> tuple[Corrections, ServedRecord]:
    """Return the factors of step times, refitted for the roles in ``fitted``, and the record of the window.

    To this end the workers that served in the window are simulated, with several factors where these are
    refitted: the record has the misses that were measured beside the simulated ones.
    """
    replayed = simulate_served(build(before), window, runs)
    after = _refit(build, window, before, replayed, fitted)
    if after != before:
        replayed = simulate_served(build(after), window, runs)
    return after, compare(window, replayed)


def _refit(
    build: Build,
    window: DrawnWindow,
    before: Corrections,
    replayed: Sequence[Traffic],
    fitted: Sequence[Role],
) -> Corrections:
    """Return the refitted factors; ``replayed`` is the whole window simulated with those ``before``."""
    compared, begun = window.newest(RECENT_S).intervals, window.newest(2 * RECENT_S)

    def apart(role: Role, others: Corrections, factor: float) -> float:
        corrections = others.with_factor(role, factor)
        again = replayed if corrections == before else simulate_served(build(corrections), begun)
        return _median_ratio(MEANS[role], compared, again[-len(compared) :])

    after = before
    for role in (each for each in ORDER if each in fitted):
        after = after.with_factor(role, _solve(partial(apart, role, after), after.of(role)))
    return after


def _median_ratio(name: str, intervals: Sequence[Interval], replayed: Sequence[Traffic]) -> float:
    """Return the median of log(measured / replayed) of that mean time, weighted by answers; 0 without any.

    Intervals in which workers came or went are left out.
    """
    servings = [intervals[0].serving, *(each.serving for each in intervals)]
    ratios = sorted(
        (math.log(measured / simulated), interval.answered)
        for interval, traffic, (was, serving) in zip(intervals, replayed, pairwise(servings), strict=True)
        if was == serving
        and interval.answered
        and (measured := getattr(interval, name)) > 0
        and (simulated := getattr(traffic, name) or 0.0) > 0
    )
    half = sum(weight for _, weight in ratios) / 2
    for ratio, weight in ratios:
        half -= weight
        if half <= 0:
            return ratio
    return 0.0


def _solve(apart: Callable[[float], float], start: float) -> float:
    """Return the factor at which ``apart`` is 0; ``start`` if that is near enough.

    ``apart`` falls as the factor grows.
    """
    start = min(max(start, FACTORS[0]), FACTORS[1])
    (low, high), place, off = map(math.log, FACTORS), math.log(start), apart(start)
    if abs(off) <= math.log(TOLERANCE):
        return start
    for _ in range(MAX_REPLAYS):
        low, high = (place, high) if off > 0 else (low, place)
        place = place + off if low < place + off < high else (low + high) / 2
        off = apart(math.exp(place))
        if abs(off) <= math.log(PRECISION):
            break
    return round(math.exp(place), 3)


# -- held to the record -----------------------------------------------------------------------------------


def compare(window: DrawnWindow, replayed: Sequence[Traffic]) -> ServedRecord:
    """Return the record of the splits that served, measured beside replayed misses, and the shifts.

    It is empty where frontends do not count misses.
    """
    intervals, life_s = window.intervals, window.intervals[0].life_s if window.intervals else 0.0
    pairs = [
        (interval, traffic)
        for drawn, interval, traffic in zip(window.drawn, intervals, replayed, strict=True)
        if drawn.begin_s >= window.drawn[0].begin_s + life_s
        and interval.late is not None
        and interval.long is not None
    ]
    streamed = _streamed_part(pairs)
    records = [_record(interval, traffic, streamed) for interval, traffic in pairs]
    by_split: dict[PoolSizes, list[SplitRecord]] = {each.workers: [] for each in reversed(records)}
    for each in records:
        by_split[each.workers].append(each)
    worse = tuple(each for each in map(_worse, by_split.values()) if any(each[1:]))
    is_one = bool(records) and len({each.serving for each in intervals}) == 1
    newest = _sum(records[-len(window.newest(RECENT_S).intervals) :]) if is_one else None
    effect = design_effect([each.requests for each in records], [each.missed for each in records])
    return ServedRecord(tuple(map(_sum, by_split.values())), newest, *_shifts(records), worse, effect)


def _streamed_part(pairs: Sequence[tuple[Interval, Traffic]]) -> float:
    """Return the part of the requests that were streamed, so that frontends know their times.

    Over all intervals: in a single one fewer have a first token than came, where they wait.
    """
    if any(interval.first_tokens is None for interval, _ in pairs):
        return 1.0
    measured = sum(interval.first_tokens or 0.0 for interval, _ in pairs)
    return min(1.0, measured / max(1.0, sum(traffic.first_tokens or 0.0 for _, traffic in pairs)))


def _record(interval: Interval, replayed: Traffic, streamed: float) -> SplitRecord:
    """Return the record of an interval; of its requests and replayed misses the ``streamed`` part."""
    return SplitRecord(
        interval.serving,
        interval.requests * streamed,
        interval.late or 0.0,
        interval.long or 0.0,
        round(streamed * replayed.over_ttft[0][1], 1),
        round(streamed * replayed.over_itl[0][1], 1),
    )


def _sum(records: Sequence[SplitRecord]) -> SplitRecord:
    """Return the sum of records, with the workers of the first one."""
    total = records[0]
    for each in records[1:]:
        total = SplitRecord(
            total.workers,
            total.requests + each.requests,
            total.late + each.late,
            total.long + each.long,
            total.foretold_late + each.foretold_late,
            total.foretold_long + each.foretold_long,
        )
    return total


def _worse(records: Sequence[SplitRecord]) -> tuple[PoolSizes, float, float]:
    total, (ttft, itl) = _sum(records), _shifts(records)
    late = min(1.0, total.late / total.requests) if ttft else 0.0
    return total.workers, late, min(1.0, total.long / total.requests) if itl else 0.0


def _shifts(records: Sequence[SplitRecord]) -> tuple[float, float]:
    came = [each.requests for each in records]
    return (
        excess_log_odds(came, [each.late for each in records], [each.foretold_late for each in records]),
        excess_log_odds(came, [each.long for each in records], [each.foretold_long for each in records]),
    )


def excess_log_odds(came: Sequence[float], measured: Sequence[float], foretold: Sequence[float]) -> float:
    """Return by how much the odds of a miss exceed the foretold ones (logarithm); 0 where chance explains it.

    Given are the requests and both numbers of misses of each interval.
    """
    requests, missed, expected = sum(came), sum(measured), sum(foretold)
    if missed <= expected or not requests:
        return 0.0
    part = min((missed + expected) / 2 / requests, 1 - 1 / (requests + 1))
    variance = max(
        2 * requests * part * (1 - part), variance_of_sum(came, list(map(sub, measured, foretold)))
    )
    if missed - expected <= Z * math.sqrt(variance):
        return 0.0
    return _logit(missed, requests) - _logit(expected, requests)


def _logit(count: float, of: float) -> float:
    """Return the logarithm of the odds of ``count`` in ``of``, half a request added (Haldane, 1956)."""
    return math.log((count + 0.5) / (max(0.0, of - count) + 0.5))
