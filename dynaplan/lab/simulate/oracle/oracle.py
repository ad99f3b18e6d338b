"""Runs the oracle: simulates schedules, tunes the quick models to the simulations, and keeps the best.

The package's page says what problem this solves and how.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.lower_bound import least_gpu_hours, why_no_lower_bound
from dynaplan.lab.simulate.oracle.pool_models import Misses, MissLog
from dynaplan.lab.simulate.oracle.prompt_costs import PromptCosts
from dynaplan.lab.simulate.oracle.schedule import Levels, SchedulePolicy, filled, schedule
from dynaplan.lab.simulate.oracle.schedule_planner import SchedulePlanner, StaticSchedule
from dynaplan.lab.simulate.oracle.trace_arrays import trace_arrays
from dynaplan.lab.simulate.run import Result, Verdict, simulate
from dynaplan.simulation.service import ServiceSettings

DEFAULT_EFFORT = 12
"""The number of simulations when the user names none: half a minute for 5000 to 8000 requests."""

FIRST_SEARCH = 6.0
"""The search for the first schedule may take this many passes (see the package's page), times the number of
simulations that the user allows: 72 by default."""

NEXT_SEARCH = 2.0
"""Every later search may take this many passes, times the same number: it begins near its end."""

FIRST_STATICS = 3
"""The most static schedules simulated before the search; the models are tuned after each that fails."""

LAST_STATICS = 4
"""The most static schedules simulated after the search."""

DOUBT = 1.0
"""A static schedule is still simulated where the models count at most M * (1 + DOUBT) misses of either
target: they may be wrong by as much."""

TUNING = (0.25, 4.0)
"""The least and the largest limit of the quick models, as multiples of the targets: beyond, a model is wrong
in another way than its limit. Even within, tuning fits the number of misses, not which requests miss."""


@dataclass(frozen=True)
class OracleOptions:
    """The SLO's percentile, and the time to spend.

    ``effort`` is the largest number of simulations, the first static ones included, and in proportion the
    search between them (``FIRST_SEARCH``, ``NEXT_SEARCH``); up to ``LAST_STATICS`` more simulate static
    schedules at the end.
    """

    percentile: float = 95.0
    effort: int = DEFAULT_EFFORT


@dataclass(frozen=True)
class Oracle:
    """The best schedule found, and its simulation.

    ``schedule`` has the moments, in seconds, and the workers wanted from each on, starting ones too. Where no
    simulated schedule meets the SLO (``verdict.is_slo_met``), it is the one with the most requests that meet
    both targets, then with the least GPU-hours, and its cost is no upper bound. ``simulations`` is the number
    of schedules simulated.
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
    """Find the cheapest schedule; every call of ``trace`` gives the same requests from the beginning."""
    return _Finder(trace, settings, options or OracleOptions()).find()


@dataclass(frozen=True)
class _SimulatedSchedule:
    """One simulated schedule; ``excess`` are the misses of the worse target beyond M.

    ``computed_s`` are the measured seconds of its prompts, where they depend on the schedule.
    """

    levels: Mapping[Role, Levels]
    entries: tuple[tuple[float, Targets], ...]
    result: Result
    missed: Misses
    excess: int
    computed_s: array[float]

    @property
    def rank(self) -> tuple[bool, int, float]:
        """The order of schedules, best first: feasible before not; then by cost, or by requests within
        both."""
        is_over = self.excess > 0
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
        self._arrays = trace_arrays(trace(), settings)
        self._costs = PromptCosts(self._static_costs)
        self._planner = SchedulePlanner(self._arrays, settings, self._costs)
        self._simulated: dict[tuple[tuple[float, Targets], ...], _SimulatedSchedule] = {}
        total = len(self._arrays.arrival_s) + self._arrays.lost
        self._may_miss = int(total * (1 - options.percentile / 100) + 1e-9)

    def find(self) -> Oracle:
        """Simulate a static schedule, then what the searches find, then cheaper static ones."""
        options, planner = self._options, self._planner
        self._simulate_smallest_static()
        planner.begin(self._allowed())
        levels: Mapping[Role, Levels] | None = None
        while self._simulations < options.effort:
            effort = options.effort * (NEXT_SEARCH if levels else FIRST_SEARCH)
            levels = planner.improve(levels, self._allowed(), effort)
            simulated = self._simulate(levels)
            if simulated is None:
                break
            self._tune(simulated)
            if not simulated.excess:
                levels = self._best.levels
                self._follow(self._best)
        self._simulate_cheaper_statics()
        best = self._best
        verdict = self._verdict(is_slo_met=not best.excess)
        return Oracle(replace(best.result, verdict=verdict), verdict, best.entries, self._simulations)

    def _verdict(self, *, is_slo_met: bool) -> Verdict:
        percentile = self._options.percentile
        if reason := why_no_lower_bound(self._settings):
            return Verdict(percentile, is_slo_met, None, reason)
        bound = least_gpu_hours(self._arrays, self._settings, percentile)
        return Verdict(percentile, is_slo_met, bound)

    @property
    def _simulations(self) -> int:
        return len(self._simulated)

    @property
    def _best(self) -> _SimulatedSchedule:
        return min(self._simulated.values(), key=lambda simulated: simulated.rank)

    def _allowed(self) -> Misses:
        """Return the misses that a search may aim at, of the requests that can be served.

        Once half the effort has found no feasible schedule, these are the misses of the best one: the search
        then looks for cheaper ones that miss no more.
        """
        most, lost = self._may_miss, self._arrays.lost
        least = Misses()
        if self._simulations > self._options.effort // 2 and self._best.excess:
            least = self._best.missed
        return Misses(max(0, max(most, least.ttft) - lost), max(0, max(most, least.itl) - lost))

    # -- static schedules ------------------------------------------------------------------------

    def _simulate_smallest_static(self) -> None:
        """Simulate the smallest static schedule that the models take to be feasible, until one is."""
        for _ in range(FIRST_STATICS):
            simulated = self._simulate(min(self._planner.statics(), key=self._static_rank).levels)
            if simulated is None or not simulated.excess:
                return
            self._tune(simulated)

    def _static_rank(self, static: StaticSchedule) -> tuple[int, int, int]:
        missed = static.missed
        excess = self._excess(missed)
        return excess, missed.ttft + missed.itl if excess else 0, static.gpus

    def _simulate_cheaper_statics(self) -> None:
        """Simulate static schedules that would be cheaper than the best, unless they fail beyond doubt."""
        statics = sorted(self._planner.statics(), key=self._static_rank)
        doubtful = [
            static for static in statics if self._excess(static.missed) <= DOUBT * max(1, self._may_miss)
        ]
        for static in doubtful[:LAST_STATICS]:
            gpu_hours = static.gpus * self._arrays.end_s / 3600
            if self._best.excess or gpu_hours < self._best.result.gpu_hours:
                self._simulate(static.levels)

    # -- simulating ------------------------------------------------------------------------------

    def _simulate(self, levels: Mapping[Role, Levels]) -> _SimulatedSchedule | None:
        """Simulate the schedule; None when it has been simulated before."""
        timings = self._planner.timings
        full = {role: filled(own, timings[role]) for role, own in levels.items()}
        entries = tuple(schedule(full, timings))
        if entries in self._simulated:
            return None
        result, computed_s = self._run(entries, self._settings)
        outcome = result.outcome
        total = outcome.requests + outcome.lost
        missed = Misses(total - outcome.ttft_met, total - outcome.itl_met)
        simulated = _SimulatedSchedule(full, entries, result, missed, self._excess(missed), computed_s)
        self._simulated[entries] = simulated
        return simulated

    def _run(
        self, entries: Sequence[tuple[float, Targets]], settings: ServiceSettings
    ) -> tuple[Result, array[float]]:
        """Simulate; return with the result the seconds that prompts took to compute, by number."""
        arrays = self._arrays
        if not arrays.are_prefixes_shared:
            result = simulate(self._trace(), settings, entries[0][1], SchedulePolicy("oracle", entries))
            return result, arrays.least_prefill_s
        computed_s = array("d", arrays.least_prefill_s)

        def note(place: int, cached_tokens: int) -> None:
            number = arrays.number_of(place)
            if number is not None:
                computed_s[number] = arrays.computing_s(number, cached_tokens)

        policy = SchedulePolicy("oracle", entries, note)
        return simulate(self._trace(), settings, entries[0][1], policy), computed_s

    def _static_costs(self, workers: int) -> array[float]:
        """Return the seconds of all prompts while that many workers compute them, and nothing is refused."""
        if not self._arrays.are_prefixes_shared:
            return self._arrays.least_prefill_s
        settings, targets = self._settings, Targets(0, workers)
        if Role.PREFILL in settings.engines:
            widths = settings.gpus_per_worker
            left = settings.gpus - workers * widths[Role.PREFILL]
            targets = Targets(workers, max(1, left // widths[Role.DECODE]))
        unlimited = replace(settings, max_waiting_requests=None, prefill_wait_s=None)
        return self._run([(0.0, targets)], unlimited)[1]

    def _follow(self, simulated: _SimulatedSchedule) -> None:
        """Let prompts cost what they did in that simulation."""
        if self._arrays.are_prefixes_shared:
            role = Role.PREFILL if Role.PREFILL in simulated.levels else Role.DECODE
            self._costs.follow(self._arrays, simulated.levels[role], simulated.computed_s)

    def _excess(self, missed: Misses) -> int:
        return max(0, missed.ttft - self._may_miss, missed.itl - self._may_miss)

    def _tune(self, simulated: _SimulatedSchedule) -> None:
        """Set the models' limits such that they count as many misses as the simulation had.

        Lost requests, which the models do not have, and TTFT misses of waiting to decode are taken off first.
        """
        self._follow(simulated)
        count, lost = len(self._arrays.arrival_s), self._arrays.lost
        log = MissLog(ttft_s=array("d", bytes(8 * count)), itl_s=array("d", bytes(8 * count)))
        delayed = self._planner.time_requests(simulated.levels, log)
        limits, slo = self._planner.limits, self._settings.slo
        assert log.ttft_s is not None and log.itl_s is not None
        missed = simulated.missed.ttft - lost - delayed
        limits.ttft_s = _fitted(log.ttft_s, missed, limits.ttft_s, slo.ttft_ms / 1000)
        limits.itl_s = _fitted(log.itl_s, simulated.missed.itl - lost, limits.itl_s, slo.itl_ms / 1000)


def _fitted(times_s: array[float], missed: int, limit_s: float, target_s: float) -> float:
    """Return the limit that ``missed`` of the times exceed, within ``TUNING``; ``limit_s`` where it fits."""
    counted = sum(time_s > limit_s for time_s in times_s)
    if counted == missed or not times_s:
        return limit_s
    ordered = sorted(times_s, reverse=True)
    missed = min(max(missed, 0), len(ordered) - 1)
    fitted_s = ordered[missed]
    return min(max(fitted_s, TUNING[0] * target_s), TUNING[1] * target_s)
