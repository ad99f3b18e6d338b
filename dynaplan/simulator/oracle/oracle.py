"""The clairvoyant oracle: the cheapest schedule found that would have met the SLO on a known trace.

It minimises the GPU hours of a ``Result`` over all numbers of workers at all times, such that at least
``percentile`` per cent of all requests of the trace meet the TTFT target, and at least as many the ITL
target. Starts cost what they cost: a worker that shall serve from a moment on is started that much earlier.
What comes out was simulated, so it can be done; that nothing is cheaper is not proven.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from dynaplan.domain.lifecycle import Role
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.oracle.bound import NO_LOWER_BOUND, least_gpu_hours
from dynaplan.simulator.oracle.plan import Planner, Static
from dynaplan.simulator.oracle.pools import Seen, Total
from dynaplan.simulator.oracle.requests import requests_of
from dynaplan.simulator.oracle.schedule import Levels, SchedulePolicy, filled, schedule
from dynaplan.simulator.run import Result, Verdict, simulate
from dynaplan.simulator.service import ServiceSettings

DEFAULT_EFFORT = 12
FIRST_SEARCH, NEXT_SEARCH = 6.0, 2.0
"""How many times the whole trace is modelled, for each simulation that may be made: before the first schedule
is simulated, and before each other one."""

FIRST_STATICS, LAST_STATICS = 3, 4
DOUBT = 1.0
"""So many static schedules are simulated at most, before and after. By so many times what may miss is a model
taken to be wrong."""

SHAKES = (1 / 3, 3.0)
"""When nothing better is found it goes elsewhere, with misses priced so many times as high, and back."""

TUNING = (0.25, 4.0)
"""So far the limits of the quick models may be tuned, as parts of the targets."""


@dataclass(frozen=True)
class OracleOptions:
    """How good it must be, and how long to look.

    ``effort`` is how many times the whole trace may be simulated, and how much is tried in between. A few
    simulations more may look at static schedules in the end.
    """

    percentile: float = 95.0
    effort: int = DEFAULT_EFFORT


@dataclass(frozen=True)
class Oracle:
    """What was found. ``schedule`` says from which second on how many workers are wanted, starting ones too.

    When no schedule that was tried meets the SLO, this is the one with the most requests that met both
    targets, then with the least GPU hours.
    """

    result: Result
    verdict: Verdict
    schedule: tuple[tuple[float, Targets], ...]
    simulations: int


def find_oracle(
    trace: Callable[[], Iterable[TracedRequest]],
    settings: ServiceSettings,
    options: OracleOptions | None = None,
) -> Oracle:
    """The cheapest schedule found for this trace; ``trace`` gives the same requests whenever it is called."""
    return _Finder(trace, settings, options or OracleOptions()).find()


@dataclass(frozen=True)
class _Tried:
    """One simulated schedule; ``over`` is by how many requests too many missed the worse target."""

    levels: Mapping[Role, Levels]
    entries: tuple[tuple[float, Targets], ...]
    result: Result
    missed: Total
    over: int

    @property
    def rank(self) -> tuple[bool, int, float]:
        """The lowest is the best: it meets the SLO and costs least, or meets both targets most often."""
        is_over = self.over > 0
        return is_over, -self.result.outcome.both_met if is_over else 0, self.result.gpu_hours


class _Finder:
    def __init__(
        self,
        trace: Callable[[], Iterable[TracedRequest]],
        settings: ServiceSettings,
        options: OracleOptions,
    ) -> None:
        self._trace = trace
        self._settings = settings
        self._options = options
        self._requests = requests_of(trace(), settings)
        self._planner = Planner(self._requests, settings)
        self._tried: dict[tuple[tuple[float, Targets], ...], _Tried] = {}
        total = len(self._requests.arrival_s) + self._requests.lost
        self._may_miss = int(total * (1 - options.percentile / 100) + 1e-9)

    def find(self) -> Oracle:
        """Static schedules first, then the way through the windows, improved as simulations tell."""
        options, planner = self._options, self._planner
        self._try_statics()
        planner.begin(self._allowed())
        levels: Mapping[Role, Levels] | None = None
        shakes, shake = iter(SHAKES), 1.0
        while self._simulations < options.effort and shake:
            search = options.effort * (NEXT_SEARCH if levels else FIRST_SEARCH)
            levels = planner.improve(levels, self._allowed(), search, shake)
            tried = self._try(levels)
            shake = 1.0 if tried else next(shakes, 0.0)
            if tried:
                self._tune(tried)
            if not (tried and tried.over):
                levels = self._best.levels
        self._try_cheaper_statics()
        best = self._best
        verdict = self._verdict(is_slo_met=not best.over)
        return Oracle(replace(best.result, verdict=verdict), verdict, best.entries, self._simulations)

    def _verdict(self, *, is_slo_met: bool) -> Verdict:
        percentile = self._options.percentile
        if self._requests.are_prefixes_shared:
            return Verdict(percentile, is_slo_met, None, NO_LOWER_BOUND)
        bound = least_gpu_hours(self._requests, self._settings, percentile)
        return Verdict(percentile, is_slo_met, bound)

    @property
    def _simulations(self) -> int:
        return len(self._tried)

    @property
    def _best(self) -> _Tried:
        return min(self._tried.values(), key=lambda each: each.rank)

    def _allowed(self) -> Total:
        """What may miss of the requests that can be served; no less than what has to, when all was tried."""
        most, lost = self._may_miss, self._requests.lost
        least = Total()
        if self._simulations > self._options.effort // 2 and self._best.over:
            least = self._best.missed
        return Total(max(0, max(most, least.ttft) - lost), max(0, max(most, least.itl) - lost))

    # -- static schedules ------------------------------------------------------------------------

    def _try_statics(self) -> None:
        """The smallest static schedule that the models believe in, tuned and chosen again if it fails."""
        for _ in range(FIRST_STATICS):
            tried = self._try(min(self._planner.statics(), key=self._static_rank).levels)
            if tried is None or not tried.over:
                return
            self._tune(tried)

    def _static_rank(self, static: Static) -> tuple[int, int, int]:
        missed = static.missed
        over = self._over(missed)
        return over, missed.ttft + missed.itl if over else 0, static.gpus

    def _try_cheaper_statics(self) -> None:
        """Static schedules that would be cheaper than the best, if the models are not sure that they fail."""
        statics = sorted(self._planner.statics(), key=self._static_rank)
        unsure = [each for each in statics if self._over(each.missed) <= DOUBT * max(1, self._may_miss)]
        for static in unsure[:LAST_STATICS]:
            gpu_hours = static.gpus * self._requests.end_s / 3600
            if self._best.over or gpu_hours < self._best.result.gpu_hours:
                self._try(static.levels)

    # -- simulating ------------------------------------------------------------------------------

    def _try(self, levels: Mapping[Role, Levels]) -> _Tried | None:
        """Simulate the schedule; None when it has been before."""
        timings = self._planner.timings
        full = {role: filled(each, timings[role]) for role, each in levels.items()}
        entries = tuple(schedule(full, timings))
        if entries in self._tried:
            return None
        policy = SchedulePolicy("oracle", entries)
        result = simulate(self._trace(), self._settings, entries[0][1], policy)
        outcome = result.outcome
        total = outcome.requests + outcome.lost
        missed = Total(total - outcome.ttft_met, total - outcome.itl_met)
        tried = self._tried[entries] = _Tried(full, entries, result, missed, self._over(missed))
        return tried

    def _over(self, missed: Total) -> int:
        return max(0, missed.ttft - self._may_miss, missed.itl - self._may_miss)

    def _tune(self, tried: _Tried) -> None:
        """Set the models' limits such that they count as many misses as there were."""
        count, lost = len(self._requests.arrival_s), self._requests.lost
        seen = Seen(ttft_s=array("d", bytes(8 * count)), itl_s=array("d", bytes(8 * count)))
        waited = self._planner.noted(tried.levels, seen)
        limits, slo = self._planner.limits, self._settings.slo
        assert seen.ttft_s is not None and seen.itl_s is not None
        missed = tried.missed.ttft - lost - waited
        limits.ttft_s = _fitted(seen.ttft_s, missed, limits.ttft_s, slo.ttft_ms / 1000)
        limits.itl_s = _fitted(seen.itl_s, tried.missed.itl - lost, limits.itl_s, slo.itl_ms / 1000)


def _fitted(values: array[float], missed: int, limit: float, target: float) -> float:
    """The limit that so many of the values exceed, within what tuning may do; as it was where that fits."""
    counted = sum(value > limit for value in values)
    if counted == missed or not values:
        return limit
    ordered = sorted(values, reverse=True)
    missed = min(max(missed, 0), len(ordered) - 1)
    fitted = ordered[missed]
    return min(max(fitted, TUNING[0] * target), TUNING[1] * target)
