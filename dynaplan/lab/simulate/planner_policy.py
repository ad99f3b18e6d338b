"""The live planner in virtual time: its own loop, its own ``decide``, and the service as its deployment."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from dynaplan.config.settings.fields import OFF
from dynaplan.config.settings.planner import Forecast, PlannerSettings
from dynaplan.contract.counts import Sample
from dynaplan.contract.option_changes import OptionChange
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.backtest import backtest
from dynaplan.planner.backtesting.runs import KeptRuns
from dynaplan.planner.backtesting.schedule import BacktestSchedule
from dynaplan.planner.forecasting.forecaster import forecast
from dynaplan.planner.forecasting.traffic_history import IntervalLoad, TrafficHistory
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.model import AverageLoad, Decision, Observation, PlannerState, Tuning
from dynaplan.planner.rules.cycle import PlanningCycle, startup_time_s
from dynaplan.planner.rules.decision import OwnPolicy, backtest_basis
from dynaplan.planner.rules.sla_policy import PerformanceModel
from dynaplan.planner.sizing.demand_forecast import forecast_traffic
from dynaplan.planner.step_learning import StepLearning
from dynaplan.simulation.meter import TrafficMeter
from dynaplan.simulation.pools import SimulatedWorker
from dynaplan.simulation.simulated_service import SimulatedService


class BlockingForecaster(Protocol):
    """A method of forecasting that is not the core's own."""

    def __call__(self, history: Sequence[float | None], steps: int) -> Forecast:
        """Forecast a curve ``steps`` intervals ahead."""
        ...

    def close(self) -> None:
        """End: no more forecasts will be asked for."""
        ...


OnDecision = Callable[[PlannerState, Observation, Decision, PlannerState], None]
"""Called with each decision: the state before it, its observation, the decision, and the state after it."""


class PlannerPolicy:
    """Plans as the live planner does: its loop, its ``decide``, and the acknowledgement of its decisions.

    It is the ``PlannedDeployment`` of that loop; ``begin`` comes before all else. ``before`` is the traffic
    of a warm-up trace. Forecasts are made by ``method``, or by the core's own. ``learning`` reads the
    engines' counters with each metric pull, as the live observer does.
    """

    def __init__(
        self,
        name: str,
        settings: PlannerSettings,
        model: PerformanceModel | None = None,
        *,
        before: Sequence[IntervalLoad] = (),
        method: BlockingForecaster | None = None,
        on_decision: OnDecision | None = None,
        own_policy: OwnPolicy | None = None,
        learning: StepLearning | None = None,
    ) -> None:
        self.name = name
        self.interval_s = settings.metric_pulling_interval_s
        self.why = ""
        self._settings = settings
        self._method = method
        self._on_decision = on_decision
        self._learning = learning
        self._model = model
        self._cycle = PlanningCycle(settings, model, own_policy=own_policy)
        is_backtested = settings.is_by_targets and settings.sizing != "formula"
        self._schedule = BacktestSchedule(settings) if is_backtested else None
        self._runs = KeptRuns()
        self._history = TrafficHistory(settings.adjustment_interval_s, before)
        self._service: SimulatedService
        self._meter: TrafficMeter
        self._desired = DesiredCounts()
        self._observed_s = 0.0

    def begin(self, service: SimulatedService) -> None:
        """Begin with the workers of the service as the first decision."""
        wanted = service.pools.wanted
        self._service, self._meter = service, service.start_meter()
        self._desired = DesiredCounts(wanted.prefill, wanted.decode, 0, 0)
        self._cycle.begin(service.now_s)
        self._observed_s = service.now_s

    def evaluate(self, service: SimulatedService) -> None:
        """Make a metric pull, and at the end of an interval a decision."""
        _run_without_waiting(self._cycle.tick(self))

    def close(self) -> None:
        """End the processes that compute forecasts, if there are any."""
        if self._method:
            self._method.close()

    def now_s(self) -> float:
        return self._service.now_s

    async def desired(self) -> DesiredCounts:
        """Return the desired counts; they are acknowledged once every wanted worker serves."""
        if self._service.pools.is_carried_out():
            self._desired = replace(self._desired, scaled_decision_id=self._desired.decision_id)
        return self._desired

    async def pull_traffic(self) -> None:
        """Have the service's meter note the arrivals since the last pull.

        A pull at the moment at which an interval begins is left out: no time has passed.
        """
        if self._service.now_s > self._observed_s:
            self._meter.pull()

    async def pull_load(self) -> Sample:
        service, learning = self._service, self._learning
        sample = service.sample()
        for role in (Role.PREFILL, Role.DECODE) if learning else ():
            assert learning
            learning.read(role, {str(each.number): self._load_of(each) for each in service.pools.all(role)})
        return sample

    def _load_of(self, worker: SimulatedWorker) -> WorkerLoad:
        """Return what the worker would answer now."""
        load = worker.engine.model.load()
        assert load.counters
        return replace(load, counters=replace(load.counters, at_s=self._service.now_s))

    async def observe(self, load: AverageLoad, state: PlannerState) -> Observation:
        """Return the observation of the interval, with the forecast where targets are planned for."""
        service, settings = self._service, self._settings
        observation = Observation(service.now_s, service.pools.counts(), self._desired, load)
        if not settings.sees_traffic:
            return observation
        traffic = self._meter.traffic(service.now_s - self._observed_s)
        self._observed_s = service.now_s
        self._history.add(traffic)
        startup_s = startup_time_s(settings, service.settings.startup_s.values())
        expected = await forecast_traffic(self._history, self._forecast, startup_s, settings)
        learnt = self._learning.known() if self._learning else LearntTimings()
        observation = replace(
            observation, traffic=traffic, foresight=expected, startup_s=startup_s, learnt=learnt
        )
        return self._with_backtest(observation, state) if self._schedule else observation

    def _with_backtest(self, observation: Observation, state: PlannerState) -> Observation:
        """Return the observation with the answer that holds; a backtest that is due is computed first.

        Virtual time does not pass meanwhile.
        """
        schedule, settings, model = self._schedule, self._settings, self._model
        assert schedule
        assert model
        schedule.add(observation)
        present, limits = backtest_basis(settings, observation)
        if question := schedule.question(observation, state, limits, present):
            schedule.note(question, backtest(model, settings, question, self._runs), observation.at_s, 0.0)
        return replace(observation, backtest=schedule.answer(observation))

    def record(
        self, before: PlannerState, observation: Observation, decision: Decision, after: PlannerState
    ) -> None:
        """Hand the decision to ``on_decision``, if there is one."""
        if self._on_decision:
            self._on_decision(before, observation, decision, after)

    async def tune(self, tuning: Tuning) -> None:
        service = self._service
        service.running_limit = tuning.running_limit
        if self._settings.max_local_prefill_length != OFF:
            service.limit_local_prefill(tuning.max_local_prefill_tokens, tuning.max_local_running)

    async def change_option(self, change: OptionChange) -> None:
        """Do nothing: a simulated planner tries no options."""

    async def apply(self, decision: Decision) -> bool:
        """Have the simulated service scale to the desired counts; it never refuses, so the answer is True."""
        desired, last = decision.desired, self._desired
        self._desired = replace(
            last,
            num_prefill_workers=desired.prefill,
            num_decode_workers=desired.decode,
            decision_id=last.next_decision_id,
        )
        self.why = decision.reason
        self._service.scale(desired)
        return True

    async def _forecast(self, requests: Sequence[tuple[Sequence[float | None], int]]) -> list[Forecast]:
        if self._method:
            return [self._method(history, steps) for history, steps in requests]
        return [forecast(history, steps, settings=self._settings) for history, steps in requests]


def _run_without_waiting(step: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine to its end without an event loop; RuntimeError for one that waits."""
    try:
        step.send(None)
    except StopIteration:
        return
    step.close()
    raise RuntimeError("a simulated deployment does not wait")
