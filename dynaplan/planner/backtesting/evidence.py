"""The traffic of the last window, as a backtest replays it, and whether the present load is within it.

**Evidence** is the traffic that decisions observe: the arrivals of each metric pull, histograms of the
lengths, and the part of the prompts that caches had. ``decisions.jsonl`` holds it, so it survives a restart
and goes with an export; no text and no single request is kept. ``drawn_requests.py`` turns it back into
requests.

**Arrival curves** (network calculus; Cruz, "A calculus for network delay", 1991). alpha(k) is the most work
that came in k intervals in a row, beta(k) the least; they are of what the last backtest saw. A split that
would have kept the promise is known to bear what lies between. With A(k) the work of the last k intervals,
the forecast one being the newest, the load is

    above   where A(k) > alpha(k) (``GROWTH_RATIO`` + 3 / sqrt(requests)) for a k up to ``MAX_STRETCH``
    below   where A(2 k) / 2 < beta(k) ``ENDED_RATIO``, less three standard deviations, for a k that is short
            beside the evidence (k ``MIN_REPEATS`` intervals): it has ended

Work is counted in requests, and for *above* in tokens of prompts and of answers, too. Longer stretches than
``MAX_STRETCH`` are seen by the next backtest.

**Slow loads.** An answer is sized for the peak of its evidence, which need not be able to come now. A worker
that is asked for when a load rises serves r intervals later (start-up, one interval until the next decision,
and the one in which the rise is measured). What the load may do meanwhile is the most that it did in as many
intervals: with S(t) the work of ``SMOOTHING`` intervals in a row that end at t,

    change = the largest (max S - min S) within any r + 1 sums in a row
    part   = (S(now) + change) / max S, at most 1

of the peak can come before another worker could serve, and that part of the answer's workers, rounded up,
bears it (``peak_part``). It is 1 for a load that changes by more than ``MAX_SLOW_CHANGE`` of its peak in r
intervals, up or down, such as bursts with pauses between them, and while at most ``MIN_HISTORY`` times r
intervals are known. Work is counted as above; the largest part is taken.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.backtesting.arrived_lengths import MIN_LENGTHS
from dynaplan.planner.backtesting.intervals import Interval
from dynaplan.planner.model import LOAD_ABOVE, LOAD_BELOW, LOAD_WITHIN
from dynaplan.planner.sizing.queueing.workload import MAX_HIT_RATE

NOTHING = Lengths.fixed(1.0)
NO_WORKERS = PoolSizes()


class Evidence:
    """The intervals of the last ``window_s`` seconds, the newest last; ``span_s`` is their length in all."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._intervals: deque[Interval] = deque()
        self._seen_s = self._seen_requests = self.span_s = 0.0

    def add(
        self,
        traffic: Traffic,
        isl: Lengths | None,
        osl: Lengths | None,
        failing: int = 0,
        serving: PoolSizes = NO_WORKERS,
    ) -> int:
        """Add an interval, drop those that are older than the window, and return how many were dropped.

        ``isl`` and ``osl`` are the histograms of recent requests. An interval without data, or before any
        length is known, is left out.
        """
        if traffic.requests == 0:  # of which no lengths are needed
            isl, osl = isl or NOTHING, osl or NOTHING
        isl, osl = _enough(traffic.isl, isl), _enough(traffic.osl, osl)
        if traffic.requests is None or isl is None or osl is None:
            return 0
        last = self._intervals[-1] if self._intervals else None
        self._intervals.append(
            Interval(
                traffic.interval_s,
                traffic.requests,
                traffic.arrivals,
                isl,
                osl,
                min(traffic.prefix_hit_rate or 0.0, MAX_HIT_RATE),
                failing,
                traffic.osl.total if traffic.osl else 0.0,
                traffic.ttft_ms or (last.ttft_ms if last else 0.0),
                traffic.itl_ms or (last.itl_ms if last else 0.0),
                self._seen_s,
                self._seen_requests,
                serving,
                late=_missed(traffic.over_ttft),
                long=_missed(traffic.over_itl),
                first_tokens=traffic.first_tokens,
            )
        )
        self._seen_s += traffic.interval_s
        self._seen_requests += traffic.requests
        self.span_s += traffic.interval_s
        dropped = 0
        while self.span_s - self._intervals[0].length_s >= self._window_s:
            self.span_s -= self._intervals.popleft().length_s
            dropped += 1
        return dropped

    @property
    def intervals(self) -> tuple[Interval, ...]:
        return tuple(self._intervals)

    @property
    def requests(self) -> float:
        return sum(each.requests for each in self._intervals)


def _enough(own: Lengths | None, recent: Lengths | None) -> Lengths | None:
    """Return the interval's own histogram, or the recent one where that has too few; None without either."""
    known = [each for each in (own, recent) if each and each.total]
    return known[-1] if known and known[0].total < MIN_LENGTHS else next(iter(known), None)


def _missed(over: Sequence[tuple[float, float]]) -> float | None:
    """Return how many missed the target; None where frontends do not count them."""
    return over[0][1] if over else None


# -- the present load beside the evidence ----------------------------------------------------------------

GROWTH_RATIO = 1.1
"""Part of the most that was seen which a load may reach and count as seen: a split has some reserve."""

ENDED_RATIO = 0.25
"""Part of the least that was seen below which a load has ended."""

DEVIATIONS = 3.0
"""Standard deviations of a Poisson number that count as chance."""

MAX_STRETCH = 8
"""Intervals of the longest stretch that is compared."""

MIN_REPEATS = 16
"""How many times as long as a stretch the evidence must be, to know how little may come in one."""


def load_change(intervals: Sequence[Interval], coming: float, known: int) -> str:
    """Return ``LOAD_ABOVE``, ``LOAD_BELOW`` or ``LOAD_WITHIN``, beside the first ``known`` intervals.

    ``coming`` are the requests that are forecast for the next interval.
    """
    if not known or len(intervals) <= known:
        return LOAD_WITHIN
    counts, *_ = works = _works(intervals)
    [ahead] = zip(*_works([replace(intervals[-1], requests=coming)]), strict=True)
    if any(_is_above(*work, counts, known) for work in zip(works, ahead, strict=True)):
        return LOAD_ABOVE
    return LOAD_BELOW if _is_below(counts, known) else LOAD_WITHIN


def _works(intervals: Sequence[Interval]) -> tuple[list[float], list[float], list[float]]:
    """Return the work of each interval: its requests, its tokens of prompts, and of answers."""
    return (
        [each.requests for each in intervals],
        [each.requests * (each.isl.mean_tokens or 0.0) for each in intervals],
        [each.requests * (each.osl.mean_tokens or 0.0) for each in intervals],
    )


def _is_above(work: Sequence[float], ahead: float, counts: Sequence[float], known: int) -> bool:
    for stretch in _stretches(known // 2):
        present = sum(work[len(work) - stretch + 1 :]) + ahead
        chance = DEVIATIONS / math.sqrt(max(1.0, *_sums(counts[:known], stretch)))
        if present > (GROWTH_RATIO + chance) * max(_sums(work[:known], stretch)):
            return True
    return False


def _is_below(counts: Sequence[float], known: int) -> bool:
    for stretch in _stretches(known // MIN_REPEATS):
        seen = counts[: min(known, len(counts) - 2 * stretch)]
        least = ENDED_RATIO * min(_sums(seen, stretch), default=0.0)
        if sum(counts[len(counts) - 2 * stretch :]) / 2 < least - DEVIATIONS * math.sqrt(least):
            return True
    return False


SMOOTHING = 2
"""Intervals whose work is summed, so that chance in one of them is no change of the load."""

MIN_HISTORY = 2
"""Times r intervals that the evidence must exceed, to know what a load may do in r."""

MAX_SLOW_CHANGE = 0.5
"""The largest change in r intervals, as a part of the peak, of a load that is called slow."""


def peak_part(intervals: Sequence[Interval], known: int, reaction: int) -> float:
    """Return the part, 0 to 1, of the ``known`` intervals' peak that can come in ``reaction`` intervals."""
    if known <= MIN_HISTORY * reaction:
        return 1.0
    return max(_peak_part(work, known, reaction) for work in _works(intervals))


def _peak_part(work: Sequence[float], known: int, reaction: int) -> float:
    seen = _sums(work[:known], SMOOTHING)
    spans = zip(*(seen[later:] for later in range(reaction + 1)), strict=False)
    change: float = max(max(span) - min(span) for span in spans)
    peak = max(1.0, *seen)
    return min(1.0, (sum(work[-SMOOTHING:]) + change) / peak) if change <= MAX_SLOW_CHANGE * peak else 1.0


def _stretches(most: int) -> Iterator[int]:
    """Yield 1, 2, 4 and so on, up to ``most`` and ``MAX_STRETCH``."""
    stretch = 1
    while stretch <= min(most, MAX_STRETCH):
        yield stretch
        stretch *= 2


def _sums(values: Sequence[float], stretch: int) -> list[float]:
    """Return the sum of each ``stretch`` values in a row."""
    totals = [0.0, *accumulate(values)]
    return [after - before for before, after in zip(totals, totals[stretch:], strict=False)]
