"""The policies that a simulation can run: the live planner's own decisions, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from dynaplan.core.forecasting.forecaster import forecast
from dynaplan.core.forecasting.traffic_history import TrafficHistory
from dynaplan.core.forecasting.warm_start import IntervalLoad
from dynaplan.core.planning.cycle import PlanningCycle
from dynaplan.core.planning.sla_policy import SlaModel
from dynaplan.core.sizing.demand_forecast import Question, foresight, questions
from dynaplan.domain.planning.decisions import Decision, PlannerState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.scaling import DesiredCounts
from dynaplan.domain.settings.forecasting import Forecast
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.simulator.service import SimulatedService


class Foretell(Protocol):
    """Who foretells a curve, so many intervals ahead; the core's own methods unless others are wanted."""

    def __call__(self, history: Sequence[float | None], steps: int, *, is_count: bool) -> Forecast:
        """What is expected; ``is_count``: the values are numbers of requests."""
        ...

    def close(self) -> None:
        """Nothing will be asked any more."""
        ...


Decided = Callable[[PlannerState, Observation, Decision, PlannerState], None]
"""Told of every decision: the state before it, what it was made of, and the state after it."""


class PlannerPolicy:
    """The live planner: its cycle, its ``decide``, and its protocol of asking and being acknowledged."""

    def __init__(
        self,
        name: str,
        settings: PlannerSettings,
        model: SlaModel | None = None,
        *,
        before: Sequence[IntervalLoad] = (),
        foretell: Foretell | None = None,
        decided: Decided | None = None,
    ) -> None:
        self.name = name
        self.every_s = settings.metric_pulling_interval_s
        self.why = ""
        self._settings = settings
        self._foretell = foretell
        self._decided = decided
        self._cycle = PlanningCycle(settings, model)
        self._history = TrafficHistory(settings.adjustment_interval_s, before)
        self._desired = DesiredCounts()
        self._seen_s = 0.0

    def begin(self, service: SimulatedService) -> None:
        """What the service started with is the first decision."""
        wanted = service.pools.wanted
        self._desired = DesiredCounts(wanted.prefill, wanted.decode, 0, 0)
        self._cycle.begin(service.now_s)
        self._seen_s = service.now_s

    def look(self, service: SimulatedService) -> None:
        """One metric pull, and at the end of an interval a decision."""
        cycle, now_s = self._cycle, service.now_s
        if cycle.is_scaling:
            if service.pools.is_carried_out():
                self._desired = replace(self._desired, scaled_decision_id=self._desired.decision_id)
            cycle.saw(self._desired, now_s)
        if not cycle.is_waiting:
            cycle.add(service.sample())
        if now_s > self._seen_s:
            service.meter.pull()
        if cycle.is_due(now_s):
            self._adjust(service)
            cycle.begin(now_s)

    def _adjust(self, service: SimulatedService) -> None:
        observation = Observation(service.now_s, service.pools.counts(), self._desired, self._cycle.load)
        if self._settings.is_by_targets:
            observation = self._with_traffic(observation, service)
        decision = self._cycle.decide(observation)
        if self._decided:
            self._decided(self._cycle.before, observation, decision, self._cycle.state)
        if decision.is_change:
            desired = decision.desired
            identifier = self._desired.next_decision_id
            self._desired = DesiredCounts(
                desired.prefill, desired.decode, identifier, self._desired.scaled_decision_id
            )
            self.why = decision.reason
            service.want(desired)
            self._cycle.asked()

    def close(self) -> None:
        """The simulation is over."""
        if self._foretell:
            self._foretell.close()

    def _told(self, asked: Question) -> Forecast:
        foretell = self._foretell or partial(forecast, settings=self._settings)
        return foretell(self._history.curve(asked.curve), asked.ahead, is_count=asked.is_count)

    def _with_traffic(self, observation: Observation, service: SimulatedService) -> Observation:
        settings, interval_s = self._settings, observation.at_s - self._seen_s
        self._seen_s = observation.at_s
        traffic = service.meter.traffic(interval_s)
        self._history.add(traffic)
        startup_s = settings.startup_time_s
        if startup_s is None:
            startup_s = max(service.settings.startup_s.values())
        answers = {asked: self._told(asked) for asked in questions(startup_s, settings.adjustment_interval_s)}
        expected = foresight(self._history, answers)
        return replace(observation, traffic=traffic, foresight=expected, startup_s=startup_s)
