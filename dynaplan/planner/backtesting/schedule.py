"""When a backtest is due, what it is asked, and how long its answer holds. Pure: the process is elsewhere.

- The first backtest needs ten minutes of evidence (``RECENT_S``), or a whole window where that is shorter,
  and, while the window is not full, enough requests to say anything of the promise (``min_requests``). A
  full window with few requests, or none, is evidence: whoever waits for more holds GPUs for nobody. Then one
  comes every twelfth of the window, five minutes of an hour, and later where it takes long: at most
  ``MAX_CPU_SHARE`` of a core is spent in the mean.
- A worker leaves only in the interval in which an answer comes (``BacktestResult.is_new``), so an answer
  never removes what was added after its evidence.
- After the load was above all that had been backtested, an answer only adds for as many intervals as are
  compared with the evidence (``MAX_STRETCH``): until then it may still be growing, and who was added for it
  would leave by what came before it.
- A backtest that fails or is killed at its deadline leaves the last answer, which then adds only.
- A load that has ended stays so, though the next backtests see its end as well as its peak, until there is
  one that sees nothing before the end, or the load comes back.
- After workers failed within the window, an answer only adds, though all serve again: the workers that a
  backtest simulates never fail.
- Once in a window the engines' options are tried as well; what was found holds until they are again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.planner.backtesting.chance import min_requests
from dynaplan.planner.backtesting.evidence import MAX_STRETCH, Evidence, load_change, peak_part
from dynaplan.planner.backtesting.intervals import RECENT_S, Interval
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.model import (
    LOAD_ABOVE,
    LOAD_BELOW,
    BacktestResult,
    Corrections,
    Observation,
    PlannerState,
    TrafficForecast,
    WorkerLimits,
)
from dynaplan.planner.sizing.look_ahead import lookahead

BACKTESTS_PER_WINDOW = 12
"""How often the traffic of a window is backtested: every five minutes of an hour."""

MAX_CPU_SHARE = 0.1
"""The part of a core that backtests take at most, in the mean."""


def window_of(settings: PlannerSettings) -> float:
    """Return the seconds that a backtest looks back: the window of the promise; ten minutes without one."""
    return settings.slo_window_s or RECENT_S


@dataclass(frozen=True)
class Question:
    """One backtest: the traffic, the splits that may be tried, and where the search begins."""

    intervals: tuple[Interval, ...]
    present: PoolSizes
    begin: PoolSizes
    limits: WorkerLimits
    corrections: Corrections
    may_miss: float
    learnt: LearntTimings = field(default_factory=LearntTimings)
    tries_options: bool = False


class BacktestSchedule:
    """The evidence of one planner, and the answer of its last backtest, which holds until the next one.

    ``tries_options``: now and then a backtest tries options of the engines, too.
    """

    def __init__(self, settings: PlannerSettings, *, tries_options: bool = False) -> None:
        self._settings = settings
        self._options_due_s = -math.inf if tries_options else math.inf
        self._window_s = window_of(settings)
        self._every_s = self._window_s / BACKTESTS_PER_WINDOW
        self._evidence = Evidence(self._window_s)
        self._answer = BacktestResult()
        self._intervals_seen = 0
        self._before_end: tuple[Interval, ...] = ()
        self._dropped_since_asked = 0
        self._due_s = self._above_s = -math.inf
        self._is_new = False

    def add(self, observation: Observation) -> None:
        """Add the traffic of an interval to the evidence."""
        traffic, foresight = observation.traffic, observation.foresight
        if traffic and foresight:
            dropped = self._evidence.add(
                _of_targets(traffic, self._settings),
                foresight.isl,
                foresight.osl,
                _failing(observation),
                PoolSizes(observation.load.prefill_workers, observation.load.decode_workers),
            )
            self._intervals_seen = max(0, self._intervals_seen - dropped)
            self._dropped_since_asked += dropped

    def question(
        self, observation: Observation, state: PlannerState, limits: WorkerLimits, present: PoolSizes
    ) -> Question | None:
        """Return what to ask now; None while no backtest is due, or too little is known.

        No other one is due until the caller reports the outcome by ``note`` or ``fail``.
        """
        if observation.at_s < self._due_s or self._missing() or observation.unknown:
            return None
        if observation.learnt.lacking(is_disaggregated=present.prefill > 0):
            return None
        self._due_s, self._dropped_since_asked = math.inf, 0
        return Question(
            self._evidence.intervals,
            present,
            self._answer.workers or present,
            limits,
            state.corrections,
            self._rest(),
            observation.learnt,
            tries_options=observation.at_s >= self._options_due_s,
        )

    def note(self, question: Question, answer: BacktestResult, at_s: float, took_s: float) -> None:
        """Note an answer, which took that many seconds of CPU time."""
        if question.tries_options:
            self._options_due_s = at_s + self._window_s
        else:
            answer = replace(answer, best_trial=self._answer.best_trial)
        self._answer, self._is_new = answer, True
        if all(each is not question.intervals[0] for each in self._before_end):
            self._before_end = ()
        self._intervals_seen = max(0, len(question.intervals) - self._dropped_since_asked)
        self._due_s = at_s + max(self._every_s, took_s / MAX_CPU_SHARE)

    def fail(self, why: str, at_s: float, took_s: float = 0.0) -> None:
        """Note that there is no answer, and why: the last one holds."""
        self._answer = replace(self._answer, missing=why)
        self._due_s = at_s + max(self._every_s, took_s / MAX_CPU_SHARE)

    def answer(self, observation: Observation) -> BacktestResult:
        """Return the last answer, with what the present load permits of it.

        Only the first call after ``note`` says that it is new.
        """
        is_new, self._is_new = self._is_new, False
        if self._answer.workers is None:
            missing = self._answer.missing or self._missing() or "the first backtest is being computed"
            return replace(self._answer, missing=missing)
        intervals, known = self._evidence.intervals, self._intervals_seen
        change = self._load_change(intervals, _coming(observation.foresight))
        if change == LOAD_ABOVE:
            self._above_s = observation.at_s
        ahead = lookahead(observation.startup_s, self._settings.adjustment_interval_s)
        return replace(
            self._answer,
            missing=self._answer.missing or self._too_soon(intervals, observation.at_s),
            is_new=is_new,
            change=change,
            peak_part=round(peak_part(intervals, known, ahead.intervals + 1), 2),
        )

    def _too_soon(self, intervals: tuple[Interval, ...], at_s: float) -> str:
        """Return why no worker may leave by this window, "" if one may."""
        if failed := max(each.failing for each in intervals):
            return f"workers failed in the window ({failed})"
        since_s = at_s - self._above_s
        if since_s < MAX_STRETCH * self._settings.adjustment_interval_s:
            return f"the load was above all that had been backtested {since_s:.0f} s ago"
        return ""

    def _load_change(self, intervals: tuple[Interval, ...], coming: float) -> str:
        before = self._before_end
        if before and load_change((*before, *intervals[-2:]), coming, len(before)) == LOAD_BELOW:
            return LOAD_BELOW
        change = load_change(intervals, coming, self._intervals_seen)
        is_end = change == LOAD_BELOW
        self._before_end = intervals[: min(self._intervals_seen, len(intervals) - 2)] if is_end else ()
        return change

    def _missing(self) -> str:
        span_s, requests = self._evidence.span_s, self._evidence.requests
        if span_s < (least_s := min(RECENT_S, self._window_s)):
            return f"{span_s:.0f} s of traffic are known, and a backtest needs {least_s:.0f}"
        if span_s < self._window_s and requests < (least := min_requests(self._rest())):
            return f"{requests:.0f} requests came in {span_s / 60:.0f} min, and a backtest needs {least}"
        return ""

    def _rest(self) -> float:
        targets = self._settings.targets()
        return min(targets.ttft_rest, targets.itl_rest)


def _failing(observation: Observation) -> int:
    """Return the workers that failed, or that start again although no decision is being carried out."""
    roles, is_asked = (observation.fleet.prefill, observation.fleet.decode), observation.desired.is_pending
    return sum(each.failed + each.backoff + (0 if is_asked else each.starting) for each in roles)


def _coming(foresight: TrafficForecast | None) -> float:
    """Return the requests that are forecast for the next interval, 0 where nobody knows."""
    return (foresight.expected[0].requests if foresight and foresight.expected else None) or 0.0


def _of_targets(traffic: Traffic, settings: PlannerSettings) -> Traffic:
    """Return the traffic with the misses of the settings' targets alone: a record may be of others."""
    late = tuple(each for each in traffic.over_ttft if each[0] == settings.ttft_ms)
    long = tuple(each for each in traffic.over_itl if each[0] == settings.itl_ms)
    return replace(traffic, over_ttft=late, over_itl=long)
