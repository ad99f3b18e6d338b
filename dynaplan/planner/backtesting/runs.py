"""Services that are simulated along the traffic: each backtest goes on where the last one stopped.

Two windows that are five minutes apart share eleven of twelve intervals, and the requests in them
(``drawn_requests.py``). So neither a split nor what stood is simulated anew: its service is kept at the end
of its last settled interval, with what was counted in each interval so far. A backtest moves it along the
intervals that have settled since, and has a copy of it answer those that have not. What it missed before the
window began no longer counts.

A run that has missed too much stops where that shows. When the window moves on the oldest misses leave it,
and the run goes on as far as the next ones allow. One that the window has left behind begins again, empty,
where the window does; so does one that is overloaded, whose backlog would grow from window to window.

All runs have the same model of the engines. One that gives about the same times (within ``SAME_TIME``) takes
its place only in new runs of all: what is measured or learnt never stands quite still. It moves most where
nothing is seen, so compared are steps that the engines do, with lengths that come, as far as targets reach.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple, Self

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.contract.traffic import Traffic
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.simulated_service import ServiceSettings, SimulatedService
from dynaplan.simulation.tally import NoTally

SAME_TIME = 1.03
"""The ratio within which times of two models are the same: another seed of the same load changes more."""

MAX_BACKLOG = 0.1
"""The largest part of a window's requests that a run may have to answer still when the next one begins."""

COMPARED_DECODES = (1, 8, 64, 256)
"""The numbers of requests that decode at once for which the times of models are compared."""

COMPARED_PROMPT_MULTIPLES = (1, 4)
"""The prompts for which they are compared, as multiples of the mean length."""


class Misses(NamedTuple):
    """How many requests missed the TTFT, the ITL, and either of them."""

    ttft: int
    itl: int
    either: int


class MissCounts:
    """A tally of the requests that missed a target, by the interval in which they arrived."""

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
        """Return the misses of the interval that began at ``at_s``, and of those after it."""
        first = bisect_left(self._begins_s, at_s)
        return Misses(sum(self._late[first:]), sum(self._long[first:]), sum(self._missed[first:]))

    def by_interval(self, since_s: float) -> list[int]:
        """Return how many missed a target, of each interval that began at ``since_s`` or later."""
        return self._missed[bisect_left(self._begins_s, since_s) :]

    def forget_before(self, at_s: float) -> None:
        """Forget the intervals that began before that moment."""
        first = bisect_left(self._begins_s, at_s)
        for counts in self._begins_s, self._late, self._long, self._missed:
            del counts[:first]

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


class _Run:
    """A service that is simulated along the traffic, until ``until_s``."""

    def __init__(self, service: SimulatedService, begin_s: float) -> None:
        self.until_s = begin_s
        self._service = service

    @property
    def in_service(self) -> int:
        """The number of requests that have come and are not answered."""
        return self._service.in_service

    def copy(self) -> Self:
        """Return a copy, which goes on from here independently."""
        return deepcopy(self, self._service.shared_by_copies())

    def _serve(self, requests: Sequence[TracedRequest], until_s: float) -> None:
        """Let the requests come, and time pass until then."""
        service = self._service
        for request in requests:
            service.run_until(request.arrival_s)
            service.arrive(request)
        service.run_until(until_s)
        service.advance_decoders(until_s)
        self.until_s = until_s


class SplitRun(_Run):
    """The run of one split, whose numbers of workers never change."""

    def __init__(self, service: ServiceSettings, workers: PoolSizes, begin_s: float) -> None:
        self.misses = MissCounts(service.slo)
        super().__init__(SimulatedService(service, workers, self.misses), begin_s)

    def serve(self, interval: DrawnInterval) -> None:
        """Let the requests of the next interval come, and time pass until its end."""
        self.misses.begin_interval(interval.begin_s)
        self._serve(interval.requests, interval.end_s)

    def finish(self) -> None:
        """Answer the requests that are left."""
        self._service.run_out()

    def forget_before(self, at_s: float) -> None:
        """Forget what was missed before that moment."""
        self.misses.forget_before(at_s)


class ServedRun(_Run):
    """The run of the workers that served, as they came and went; ``counted`` is by each interval's begin."""

    def __init__(self, service: ServiceSettings, workers: PoolSizes, begin_s: float) -> None:
        self.gpus = service.gpus
        self.counted: dict[float, Traffic] = {}
        super().__init__(SimulatedService(service, workers, NoTally()), begin_s)
        self._meter = self._service.start_meter()

    def serve(self, interval: DrawnInterval, serving: PoolSizes) -> None:
        """Let the requests of the next interval come, and time pass until its end.

        From its middle on ``serving`` workers are wanted.
        """
        middle_s = (interval.begin_s + interval.end_s) / 2
        early = bisect_left(interval.requests, middle_s, key=lambda each: each.arrival_s)
        self._serve(interval.requests[:early], middle_s)
        if serving != self._service.pools.wanted:
            self._service.scale(serving)
        self._serve(interval.requests[early:], interval.end_s)
        self.counted[interval.begin_s] = self._meter.traffic(interval.end_s - interval.begin_s)

    def forget_before(self, at_s: float) -> None:
        """Forget what was counted before that moment."""
        self.counted = {begin_s: traffic for begin_s, traffic in self.counted.items() if begin_s >= at_s}


class KeptRuns:
    """The runs of one planner, from one backtest to the next."""

    def __init__(self) -> None:
        self._service: ServiceSettings | None = None
        self._newest: object = None
        self._splits: dict[PoolSizes, SplitRun] = {}
        self._served: ServedRun | None = None

    def begin(self, service: ServiceSettings, window: Sequence[DrawnInterval]) -> None:
        """Begin a backtest of that window, and drop the kept runs that are of no use to it.

        Those simulate another model or other traffic, stopped before the window, or have too long a backlog.
        """
        if not self._can_go_on(service, window):
            self._service, self._splits, self._served = service, {}, None
        if not window:
            return
        self._newest = window[-1].identity
        begin_s, most = window[0].begin_s, MAX_BACKLOG * sum(each.count for each in window)

        def is_of_use(run: _Run) -> bool:
            return run.until_s >= begin_s and run.in_service <= most

        self._splits = {workers: run for workers, run in self._splits.items() if is_of_use(run)}
        self._served = self._served if self._served and is_of_use(self._served) else None
        for run in self._splits.values():
            run.forget_before(begin_s)

    def _can_go_on(self, service: ServiceSettings, window: Sequence[DrawnInterval]) -> bool:
        """Tell whether the kept runs simulate that service, and ended with an interval of that window."""
        if self._service is None or all(each.identity != self._newest for each in window):
            return False
        newest = next((each.requests for each in reversed(window) if each.count), ())
        return is_same(self._service, service, newest)

    def of(self, workers: PoolSizes, begin_s: float) -> SplitRun:
        """Return the kept run of the split, or a new one that begins at ``begin_s``."""
        assert self._service, "a backtest has begun"
        if workers not in self._splits:
            self._splits[workers] = SplitRun(self._service, workers, begin_s)
        return self._splits[workers]

    def simulate_served(
        self, window: Sequence[DrawnInterval], servings: Sequence[PoolSizes]
    ) -> list[Traffic]:
        """Return what frontends would have counted in each interval with the workers that served in it."""
        if not window:
            return []
        kept = course = self._served_run(window[0].begin_s, servings)
        kept.forget_before(window[0].begin_s)
        for interval, serving in zip(window, servings, strict=True):
            if interval.end_s > course.until_s:
                if course is kept and not interval.is_settled:
                    course = kept.copy()
                course.serve(interval, serving)
        return [course.counted[each.begin_s] for each in window]

    def _served_run(self, begin_s: float, servings: Sequence[PoolSizes]) -> ServedRun:
        """Return the kept run of the workers that served; a new one where its GPUs are too few."""
        assert self._service, "a backtest has begun"
        most = {role: max(each.of(role) for each in servings) for role in self._service.engines}
        gpus = sum(workers * self._service.gpus_per_worker[role] for role, workers in most.items())
        if self._served is None or self._served.gpus < 2 * gpus:  # those who leave hold theirs for a while
            settings = replace(self._service, gpus=2 * max(gpus, self._service.gpus))
            self._served = ServedRun(settings, servings[0], begin_s)
        return self._served


def is_same(one: ServiceSettings, other: ServiceSettings, requests: Sequence[TracedRequest]) -> bool:
    """Tell whether two services are alike, but for step times within ``SAME_TIME`` of each other.

    Compared are the steps of requests that are as long as these in the mean; none where there are none. One
    that is over the target in both is alike: it misses.
    """
    if replace(one, engines={}) != replace(other, engines={}) or one.engines.keys() != other.engines.keys():
        return False
    for role, (settings, _) in one.engines.items():
        other_settings, _ = other.engines[role]
        if settings != other_settings:
            return False
        times = zip(_times(one, role, requests), _times(other, role, requests), strict=True)
        if not all(
            min(ms, other_ms) > target_ms or _is_near(ms, other_ms)
            for (ms, target_ms), (other_ms, _) in times
        ):
            return False
    return True


def _times(
    service: ServiceSettings, role: Role, requests: Sequence[TracedRequest]
) -> Iterator[tuple[float, float]]:
    """Yield the ms of steps that engines of that role do, each with the target that it is to keep."""
    if not requests:
        return
    _, timing = service.engines[role]
    prompt = fmean(each.prompt_tokens for each in requests)
    if role is Role.PREFILL or Role.PREFILL not in service.engines:
        for factor in COMPARED_PROMPT_MULTIPLES:
            yield timing.step_ms(0, 0, [(0, round(factor * prompt))], 1), service.slo.ttft_ms
    if role is Role.DECODE:
        context = prompt + fmean(each.output_tokens for each in requests) / 2
        for decodes in COMPARED_DECODES:
            yield timing.decode_ms(decodes, decodes * context), service.slo.itl_ms


def _is_near(one: float, other: float) -> bool:
    return one <= SAME_TIME * other and other <= SAME_TIME * one
