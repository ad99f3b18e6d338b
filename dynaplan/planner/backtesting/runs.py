"""Splits that stand still, simulated along the traffic: each backtest goes on where the last one stopped.

Two windows that are five minutes apart share eleven of twelve intervals, and the requests in them
(``drawn_requests.py``). So a split is not simulated anew: its service is kept at the end of its last settled
interval, with what was missed in each interval so far. A backtest moves it along the intervals that have
settled since, and has a copy of it answer those that have not. What it missed before the window began no
longer counts.

A run that has missed too much stops where that shows. When the window moves on the oldest misses leave it,
and the run goes on as far as the next ones allow. One that the window has left behind begins again, empty,
where the window does; so does one that is overloaded, whose backlog would grow from window to window.

All runs have the same model of the engines. One that gives about the same times (within ``SAME_TIME``) takes
its place only in new runs of all; measured factors never stand quite still.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.simulated_service import ServiceSettings, SimulatedService

SAME_TIME = 1.03
"""The ratio within which times of two models are the same: another seed of the same load changes more."""

MAX_BACKLOG = 0.1
"""The largest part of a window's requests that a run may have to answer still when the next one begins."""

COMPARED_DECODES = (1, 8, 64, 256)
COMPARED_TOKENS = (128, 1024, 8192)
"""Requests that decode, and tokens of a prompt or a context, for which the times of models are compared."""


class Misses(NamedTuple):
    """How many requests missed the TTFT, the ITL, and either of them."""

    ttft: int
    itl: int
    either: int


class MissCounts:
    """A tally of what a backtest asks: the requests that missed, by the interval in which they arrived."""

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        self._begins_s: list[float] = []
        self._late: list[int] = []
        self._long: list[int] = []
        self._missed: list[int] = []

    def begin_interval(self, at_s: float) -> None:
        """Let what arrives from that moment on count in an interval of its own."""
        self._begins_s.append(at_s)
        for counts in self._late, self._long, self._missed:
            counts.append(0)

    def since(self, at_s: float) -> Misses:
        """Return the misses of the intervals since the one that began then."""
        first = bisect_left(self._begins_s, at_s)
        return Misses(sum(self._late[first:]), sum(self._long[first:]), sum(self._missed[first:]))

    def forget_before(self, at_s: float) -> None:
        """Forget the intervals that began before that moment."""
        first = bisect_left(self._begins_s, at_s)
        for counts in self._begins_s, self._late, self._long, self._missed:
            del counts[:first]

    def arrived(self) -> None:
        """Do nothing: how many came is known."""

    def first_token(self, ttft_s: float) -> None:
        """Do nothing: the end of the answer tells."""

    def lost(self, traced: TracedRequest) -> None:
        """Count a request that is never answered as one that misses the TTFT."""
        self._note(traced.arrival_s, is_late=True, is_long=False)

    def answered(
        self, traced: TracedRequest, worker: int, begun_s: float, first_s: float, end_s: float, cached: int
    ) -> None:
        """Count an answered request where it missed a target."""
        gaps, slo = traced.output_tokens - 1, self._slo
        is_late = 1000 * (first_s - traced.arrival_s) > slo.ttft_ms
        is_long = gaps > 0 and 1000 * (end_s - first_s) / gaps > slo.itl_ms
        if is_late or is_long:
            self._note(traced.arrival_s, is_late=is_late, is_long=is_long)

    def _note(self, arrival_s: float, *, is_late: bool, is_long: bool) -> None:
        index = bisect_right(self._begins_s, arrival_s) - 1
        if index >= 0:
            self._late[index] += is_late
            self._long[index] += is_long
            self._missed[index] += 1


class SplitRun:
    """One split, simulated until ``until_s``."""

    def __init__(self, service: ServiceSettings, workers: PoolSizes, begin_s: float) -> None:
        self.until_s = begin_s
        self.misses = MissCounts(service.slo)
        self._service = SimulatedService(service, workers, self.misses)

    def serve(self, interval: DrawnInterval) -> None:
        """Let the requests of the next interval come, and time pass until its end."""
        service = self._service
        self.misses.begin_interval(interval.begin_s)
        for request in interval.requests:
            service.run_until(request.arrival_s)
            service.arrive(request)
        service.run_until(interval.end_s)
        service.advance_decoders(interval.end_s)
        self.until_s = interval.end_s

    @property
    def in_service(self) -> int:
        """The number of requests that have come and are not answered."""
        return self._service.in_service

    def finish(self) -> None:
        """Answer the requests that are left."""
        self._service.run_out()

    def copy(self) -> SplitRun:
        """Return a run that goes on from here by itself."""
        return deepcopy(self, self._service.shared_by_copies())


class SplitRuns:
    """The runs of one planner, from one backtest to the next."""

    def __init__(self) -> None:
        self._service: ServiceSettings | None = None
        self._newest: object = None
        self._runs: dict[PoolSizes, SplitRun] = {}

    def begin(self, service: ServiceSettings, window: Sequence[DrawnInterval]) -> None:
        """Begin a backtest of that window: runs of another model, of other traffic or of the past end."""
        is_known = any(each.identity == self._newest for each in window)
        if not is_known or self._service is None or not is_same(self._service, service):
            self._service, self._runs = service, {}
        if window:
            self._newest = window[-1].identity
            begin_s, most = window[0].begin_s, MAX_BACKLOG * sum(each.count for each in window)
            self._runs = {
                split: run
                for split, run in self._runs.items()
                if run.until_s >= begin_s and run.in_service <= most
            }
            for run in self._runs.values():
                run.misses.forget_before(begin_s)

    def of(self, workers: PoolSizes, begin_s: float) -> SplitRun:
        """Return the run of the split, to be moved along the window that begins then."""
        assert self._service, "a backtest has begun"
        if workers not in self._runs:
            self._runs[workers] = SplitRun(self._service, workers, begin_s)
        return self._runs[workers]


def is_same(one: ServiceSettings, other: ServiceSettings) -> bool:
    """Tell whether two services are alike, but for times of steps that differ by chance."""
    if replace(one, engines={}) != replace(other, engines={}) or one.engines.keys() != other.engines.keys():
        return False
    for role, (settings, timing) in one.engines.items():
        other_settings, other_timing = other.engines[role]
        if settings != other_settings or not all(map(_is_near, _times(timing), _times(other_timing))):
            return False
    return True


def _times(timing: StepTiming) -> Iterator[float]:
    for tokens in COMPARED_TOKENS:
        yield timing.step_ms(0, 0, [(0, tokens)], 1)
        yield from (timing.decode_ms(decodes, decodes * tokens) for decodes in COMPARED_DECODES)


def _is_near(one: float, other: float) -> bool:
    return one <= SAME_TIME * other and other <= SAME_TIME * one
