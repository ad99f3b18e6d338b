"""The traffic of past intervals: curves to forecast from, begun by a warm-up trace, and recent lengths."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from dynaplan.config.settings.planner import HISTORY_INTERVALS
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.forecasting.arrivals import Dispersions, average_dispersions, dispersions_of
from dynaplan.planner.forecasting.series import join_warm_up


class IntervalLoad(NamedTuple):
    """The requests that arrived in one interval, and their mean lengths; None where there were none."""

    requests: int
    isl_tokens: float | None
    osl_tokens: float | None


def interval_history(trace: Iterable[TracedRequest], interval_s: float) -> list[IntervalLoad]:
    """Cut the trace into intervals from 0 s on. One without requests is 0 requests, not left out.

    The last interval is left out, unless it is the only one: the trace ends somewhere in it, and a part of
    an interval would look like a fall of the load. Arrivals must not go back beyond an interval.
    """
    intervals: list[IntervalLoad] = []
    index, count, isl, osl = 0, 0, 0, 0

    def close() -> None:
        means = (isl / count, osl / count) if count else (None, None)
        intervals.append(IntervalLoad(count, *means))

    for request in trace:
        now = math.floor(request.arrival_s / interval_s)
        while index < now:
            close()
            index, count, isl, osl = index + 1, 0, 0, 0
        count, isl, osl = count + 1, isl + request.prompt_tokens, osl + request.output_tokens
    if count and not intervals:
        close()
    return intervals


HALF_LIFE_S = 300.0
"""Half-life of what is called recent: lengths in the histograms, dispersion, hits; s."""

MIN_REQUESTS_FOR_HITS = 20
"""Requests in an interval below which its hits say too little by themselves."""

Curve = list[float | None]
"""One value per interval, the newest last; None is "no data"."""


@dataclass
class _Curves:
    requests: Curve
    isl_tokens: Curve
    osl_tokens: Curve


class TrafficHistory:
    """One value per adjustment interval for each curve, the newest last, as many as forecasts need.

    ``before`` is a warm-up: the intervals of another day's trace. The live history counts from its first
    traffic on. ``isl`` and ``osl`` are the histograms of recent requests, ``dispersion`` the recent mean of
    ``Traffic.dispersion``, ``dispersions`` that of the arrivals at several time scales. Of prompts, the
    recent tokens and the cached ones among them are kept.
    """

    def __init__(self, interval_s: float, before: Iterable[IntervalLoad] = ()) -> None:
        self._interval_s = interval_s
        self._decay_factor = 0.5 ** (interval_s / HALF_LIFE_S)
        warm = list(before)[-HISTORY_INTERVALS:]
        self._warm = _Curves(
            [float(load.requests) for load in warm],
            [load.isl_tokens for load in warm],
            [load.osl_tokens for load in warm],
        )
        self._live = _Curves([], [], [])
        self.isl: Lengths | None = None
        self.osl: Lengths | None = None
        self.dispersion: float | None = None
        self.dispersions: Dispersions = ()
        self._dispersions = 0
        self._prompt_tokens = self._cached_tokens = 0.0
        self._newest_hit_rate = 1.0

    def add(self, traffic: Traffic) -> None:
        """Add an interval; one that lasted longer or shorter is scaled to the adjustment interval."""
        requests = traffic.requests
        if requests is not None:
            requests *= self._interval_s / traffic.interval_s
        live = self._live
        for curve, value in (
            (live.requests, requests),
            (live.isl_tokens, traffic.isl_tokens),
            (live.osl_tokens, traffic.osl_tokens),
        ):
            curve.append(value)
            del curve[:-HISTORY_INTERVALS]
        self.isl = self._decay(self.isl, traffic.isl)
        self.osl = self._decay(self.osl, traffic.osl)
        self._add_hits(traffic)
        if traffic.dispersion is not None:
            # One interval has few pulls: the mean, until that is the slower one.
            self._dispersions += 1
            weight, before = max(1 - self._decay_factor, 1 / self._dispersions), self.dispersion or 0.0
            self.dispersion = before + weight * (traffic.dispersion - before)
            newest = dispersions_of(traffic.arrivals, traffic.interval_s)
            self.dispersions = average_dispersions(self.dispersions, newest, weight)

    def _add_hits(self, traffic: Traffic) -> None:
        hit_rate, tokens = traffic.prefix_hit_rate, (traffic.requests or 0.0) * (traffic.isl_tokens or 0.0)
        if hit_rate is not None:
            self._prompt_tokens = self._decay_factor * self._prompt_tokens + tokens
            self._cached_tokens = self._decay_factor * self._cached_tokens + tokens * hit_rate
            self._newest_hit_rate = hit_rate if (traffic.requests or 0.0) >= MIN_REQUESTS_FOR_HITS else 1.0

    @property
    def prefix_hit_rate(self) -> float | None:
        """The part of prompts' tokens that will come out of a KV cache; None where none was measured.

        The recent mean, or the newest interval's where that is lower: caches are lost at once, with a worker
        or to a load that no longer fits, and fill slowly.
        """
        if not self._prompt_tokens:
            return None
        return min(self._cached_tokens / self._prompt_tokens, self._newest_hit_rate)

    def curve(self, name: str) -> Curve:
        """Return the history of ``requests``, ``isl_tokens`` or ``osl_tokens``, warm-up included."""
        return join_warm_up(getattr(self._warm, name), getattr(self._live, name))[-HISTORY_INTERVALS:]

    @property
    def interval_s(self) -> float:
        """Length of one adjustment interval, seconds."""
        return self._interval_s

    def _decay(self, before: Lengths | None, newest: Lengths | None) -> Lengths | None:
        """Return the histogram with the old counts faded and the newest added.

        Without newest requests nothing fades; newest ones in other buckets stand alone.
        """
        if newest is None or not newest.total:
            return before
        if before is None or before.upper_bounds_tokens != newest.upper_bounds_tokens:
            return newest
        return replace(before, counts=tuple(self._decay_factor * count for count in before.counts)) + newest
