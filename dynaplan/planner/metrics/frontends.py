"""The traffic of a deployment, counted by its frontends and read from their ``/metrics``."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from dynaplan.contract.traffic import Traffic
from dynaplan.http.client import get
from dynaplan.http.tls import ClientTls, trusted
from dynaplan.planner.metrics.exposition import (
    DEFAULT_PREFIX,
    REQUESTS,
    Counts,
    Exposition,
    dispersion,
    has_restarted,
    increase,
    traffic_of,
)
from dynaplan.planner.timing import FRONTEND_TIMEOUT_S
from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)

MAX_DEPARTED_FRONTENDS = 64
"""The number of departed frontends that are remembered: one that comes back continues its counts."""


@dataclass
class _Frontend:
    """One address. ``counts`` are those of its last answer, at ``at_s``; None before its first answer."""

    counts: Counts | None
    at_s: float
    problem: str = ""


class FrontendsTraffic:
    """``GET {url}/metrics`` of every frontend at once; see ``dynaplan.planner.ports.TrafficSource``.

    ``urls`` gives the addresses of the frontends at this moment; several processes behind one address add up
    their counts themselves, and are one frontend here. The growth of the counts between two answers of a
    frontend is added up over all frontends: a mean is one over requests (or tokens), not over frontends.

    ========================================  =========================================================
    a frontend that                           counts
    ========================================  =========================================================
    is listed at the first pull               from its first answer on: its past is not of this interval
    is listed later                           from 0: it has begun since
    began anew (a count fell)                 from 0
    does not answer                           with its next answer; the part of the intervals that are over
                                              by then is left out, as if its requests had come evenly
    is gone                                   up to its last answer
    ========================================  =========================================================

    Frontends of other hosts that speak https are verified by ``tls``.

    ``Traffic.interval_s`` is the time between the pulls that were compared. It may differ from the time
    between two calls: the first pull may come late.
    """

    def __init__(
        self,
        urls: Callable[[], Iterable[str]],
        namespace: str,
        clock: Clock,
        *,
        model: str = "",
        is_one_of_several: bool = False,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = FRONTEND_TIMEOUT_S,
        tls: ClientTls = True,
    ) -> None:
        self._urls = urls
        self._tls = tls
        self._clock = clock
        self._exposition = Exposition(prefix, namespace, model, is_one_of_several=is_one_of_several)
        self._timeout_s = timeout_s
        self._frontends: dict[str, _Frontend] = {}
        self._listed: tuple[str, ...] = ()
        self._pulled_s = -math.inf
        self._began_s = clock.now_s()
        self._seen: Counts = {}
        self._comparisons = 0
        self._windows: list[tuple[float, float]] = []
        self._window_began_s: float | None = None
        self._window_arrivals = 0.0

    async def pull(self) -> None:
        """Ask every frontend; takes no longer than the timeout."""
        at_s = self._clock.now_s()
        self._listed = tuple(dict.fromkeys(self._urls()))
        self._remember()
        answers = await asyncio.gather(*(self._counts(url) for url in self._listed))
        if self._pulled_s == -math.inf:
            self._began_s = at_s
        self._pulled_s = at_s
        for url, counts in zip(self._listed, answers, strict=True):
            if counts is not None:
                self._compare(self._frontends[url], counts, at_s)
        if self._listed and None not in answers:
            self._end_window(at_s)

    async def traffic(self, interval_s: float) -> Traffic:
        """Return what was counted between the newest pulls of the last call and of this one; begin anew.

        ``Traffic.interval_s`` is the time between these two pulls, or ``interval_s`` where there are not two.
        """
        seen = self._growth(interval_s)
        # Without a pull in this interval nothing is known of it, and what comes later is not of it.
        was_pulled = self._pulled_s > self._began_s
        self._began_s = self._pulled_s if was_pulled else self._clock.now_s()
        self._seen, self._comparisons, self._windows = {}, 0, []
        return seen

    def _growth(self, interval_s: float) -> Traffic:
        windows = self._windows
        if not self._comparisons:
            return Traffic(interval_s, missing=self._missing())
        if self._pulled_s > self._began_s:
            interval_s = self._pulled_s - self._began_s
        if unserved := self._exposition.served.unserved:
            return Traffic(interval_s, missing=unserved)
        arrivals = tuple(arrived for _, arrived in windows)
        return replace(traffic_of(interval_s, self._seen, dispersion(windows)), arrivals=arrivals)

    async def close(self) -> None:
        """Do nothing: no connection outlives its pull."""

    def _remember(self) -> None:
        for url in self._listed:
            if url not in self._frontends:
                is_first_pull = self._pulled_s == -math.inf
                self._frontends[url] = _Frontend(None if is_first_pull else {}, self._pulled_s)
        gone = [url for url in self._frontends if url not in self._listed]
        for url in gone[:-MAX_DEPARTED_FRONTENDS]:
            del self._frontends[url]

    async def _counts(self, url: str) -> Counts | None:
        frontend = self._frontends[url]
        try:
            counts = self._exposition.read(await self._text(f"{url.rstrip('/')}/metrics"))
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            level = logging.DEBUG if frontend.problem else logging.WARNING
            log.log(level, "the frontend at %s does not tell its traffic: %s", url, problem)
            frontend.problem = problem
            return None
        if frontend.problem:
            log.info("the frontend at %s tells its traffic again", url)
        frontend.problem = ""
        return counts

    async def _text(self, url: str) -> bytes:
        return (await get(url, timeout_s=self._timeout_s, tls=trusted(url, self._tls))).body

    def _compare(self, frontend: _Frontend, now: Counts, at_s: float) -> None:
        before, since_s = frontend.counts, frontend.at_s
        frontend.counts, frontend.at_s = now, at_s
        if before is None:
            return
        self._comparisons += 1
        part = 1.0
        if has_restarted(before, now):
            before = {}
        elif since_s < self._began_s < at_s:
            part = (at_s - self._began_s) / (at_s - since_s)
        grown = increase(before, now)
        for key, value in grown.items():
            self._seen[key] = self._seen.get(key, 0.0) + part * value
        self._window_arrivals += grown.get((REQUESTS, ""), 0.0)

    def _end_window(self, at_s: float) -> None:
        """End a window of arrivals: all frontends have answered, as they had at its beginning."""
        if self._window_began_s is not None:
            self._windows.append((at_s - self._window_began_s, self._window_arrivals))
        self._window_began_s, self._window_arrivals = at_s, 0.0

    def _missing(self) -> str:
        if not self._listed:
            return "no frontend is registered"
        problems = [each.problem for url in self._listed if (each := self._frontends[url]).problem]
        if problems:
            return f"{len(problems)} of {len(self._listed)} frontends did not answer: {problems[0]}"
        return "the frontends have not been looked at twice yet"
