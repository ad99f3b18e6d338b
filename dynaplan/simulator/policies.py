"""The live planner in virtual time: its own cycle, its own ``decide``, and the service as its fleet."""

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
from dynaplan.core.planning.startup_time import startup_time_s
from dynaplan.core.sizing.demand_forecast import Question, foresight, questions
from dynaplan.domain.planning.decisions import Decision, PlannerState
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.scaling import DesiredCounts
from dynaplan.domain.settings.forecasting import Forecast
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.simulator.service import SimulatedService


class ForecastMethod(Protocol):
    """A method of forecasting that is not the core's own."""

    def __call__(self, history: Sequence[float | None], steps: int, *, is_count: bool) -> Forecast:
        """Forecast a curve ``steps`` intervals ahead; ``is_count``: the values are numbers of requests."""
        ...

    def close(self) -> None:
        """End: no more forecasts will be asked for."""
        ...


OnDecision = Callable[[PlannerState, Observation, Decision, PlannerState], None]
"""Called with each decision: the state before it, its observation, the decision, and the state after it."""


class PlannerPolicy:
    """Plans as the live planner does: its cycle, its ``decide``, and the acknowledgement of its decisions.

    ``before`` is the traffic of a warm-up trace. Forecasts are made by ``method``, or by the core's own.
    """

    def __init__(
        self,
        name: str,
        settings: PlannerSettings,
        model: SlaModel | None = None,
        *,
        before: Sequence[IntervalLoad] = (),
        method: ForecastMethod | None = None,
        on_decision: OnDecision | None = None,
    ) -> None:
        self.name = name
        self.every_s = settings.metric_pulling_interval_s
        self.why = ""
        self._settings = settings
        self._method = method
        self._on_decision = on_decision
        self._cycle = PlanningCycle(settings, model)
        self._history = TrafficHistory(settings.adjustment_interval_s, before)
        self._desired = DesiredCounts()
        self._looked_s = 0.0

    def begin(self, service: SimulatedService) -> None:
        """Begin with the workers of the service as the first decision."""
        wanted = service.pools.wanted
        self._desired = DesiredCounts(wanted.prefill, wanted.decode, 0, 0)
        self._cycle.begin(service.now_s)
        self._looked_s = service.now_s

    def look(self, service: SimulatedService) -> None:
        """Make a metric pull, and at the end of an interval a decision."""
        cycle, now_s = self._cycle, service.now_s
        if cycle.is_scaling:
            if service.pools.is_carried_out():
                self._desired = replace(self._desired, scaled_decision_id=self._desired.decision_id)
            cycle.saw(self._desired, now_s)
        if not cycle.is_waiting:
            cycle.add(service.sample())
        if now_s > self._looked_s:
            service.meter.pull()
        if cycle.is_due(now_s):
            self._adjust(service)
            cycle.begin(now_s)

    def _adjust(self, service: SimulatedService) -> None:
        observation = Observation(service.now_s, service.pools.counts(), self._desired, self._cycle.load)
        if self._settings.is_by_targets:
            observation = self._with_traffic(observation, service)
        decision = self._cycle.decide(observation)
        if self._on_decision:
            self._on_decision(self._cycle.before, observation, decision, self._cycle.state)
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
        """End the processes that compute forecasts, if there are any."""
        if self._method:
            self._method.close()

    def _forecast(self, asked: Question) -> Forecast:
        method = self._method or partial(forecast, settings=self._settings)
        return method(self._history.curve(asked.curve), asked.ahead, is_count=asked.is_count)

    def _with_traffic(self, observation: Observation, service: SimulatedService) -> Observation:
        settings, interval_s = self._settings, observation.at_s - self._looked_s
        self._looked_s = observation.at_s
        traffic = service.meter.traffic(interval_s)
        self._history.add(traffic)
        startup_s = startup_time_s(settings, service.settings.startup_s.values())
        answers = {
            asked: self._forecast(asked) for asked in questions(startup_s, settings.adjustment_interval_s)
        }
        expected = foresight(self._history, answers, settings)
        return replace(observation, traffic=traffic, foresight=expected, startup_s=startup_s)
