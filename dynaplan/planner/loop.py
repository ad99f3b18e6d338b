"""The planning loop: pull, and every adjustment interval observe, decide, record, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from dynaplan.contract.counts import FleetCounts
from dynaplan.planner.model import Decision, DecisionRecord, Observation
from dynaplan.planner.ports import NothingToPlan
from dynaplan.planner.rules.cycle import PlanningCycle, startup_time_s
from dynaplan.planner.rules.decision import has_data
from dynaplan.planner.timing import READY_POLL_S, WAITING_LOG_S
from dynaplan.util.errors import DynaplanError

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.contract.counts import Sample
    from dynaplan.contract.option_changes import OptionChange
    from dynaplan.contract.store_keys import DesiredCounts
    from dynaplan.planner.backtesting.backtester import LiveBacktester
    from dynaplan.planner.model import AverageLoad, PlannerState, Tuning
    from dynaplan.planner.observer import Observer, TrafficObserver
    from dynaplan.planner.ports import Connector, Recorder
    from dynaplan.planner.rules.decision import OwnPolicy
    from dynaplan.planner.rules.sla_policy import PerformanceModel
    from dynaplan.planner.virtual.tuning_publisher import TuningPublisher
    from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)

NO_SCALING = "No scaling needed (prefill=%d, decode=%d)"
"""Log line of an interval that changes nothing, as Dynamo's "SLA Planner" guide words it."""


def local_time() -> str:
    """Return the wall time with its offset, ISO 8601."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


class PlannerLoop:
    """One planner. ``run`` never returns, and only a cancellation leaves it. ``state`` is remembered.

    It is the ``PlannedDeployment`` of its ``PlanningCycle``, which says when to pull and when to decide.
    ``beat`` is called at every pull, with the seconds until the next one is due.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        observer: Observer,
        connector: Connector,
        recorders: Sequence[Recorder],
        clock: Clock,
        *,
        model: PerformanceModel | None = None,
        traffic: TrafficObserver | None = None,
        backtester: LiveBacktester | None = None,
        wall_time: Callable[[], str] = local_time,
        beat: Callable[[float], None] = lambda every_s: None,
        state: PlannerState | None = None,
        own_policy: OwnPolicy | None = None,
        publisher: TuningPublisher | None = None,
    ) -> None:
        self._settings = settings
        self._publisher = publisher
        self._observer = observer
        self._connector = connector
        self._recorders = recorders
        self._clock = clock
        self._wall_time = wall_time
        self._beat = beat
        self._traffic = traffic
        self._backtester = backtester
        self._cycle = PlanningCycle(settings, model, state, own_policy)
        self._failure = ""
        self._unknown = ""
        self._is_warned = False

    async def run(self) -> None:
        """Wait until a decode worker is ready, unless none was asked for, then plan for ever."""
        await self._wait_ready()
        log.info("planning for namespace %s%s", self._settings.namespace, self._mode())
        self._cycle.begin(self._clock.now_s())
        next_s = self._clock.now_s()
        while True:
            self._beat(self._settings.metric_pulling_interval_s)
            try:
                await self._cycle.tick(self)
            except Exception:
                log.exception("this pull failed; going on with the next one")
            # A pull that took longer than its interval does not make the next ones come in a burst.
            next_s = max(next_s + self._settings.metric_pulling_interval_s, self._clock.now_s())
            await self._clock.sleep(next_s - self._clock.now_s())

    async def _wait_ready(self) -> None:
        """Return when a decode worker is ready; until then say what is missing, every 30 s."""
        next_line_s = self._clock.now_s()
        while missing := await self._missing():
            self._beat(READY_POLL_S)
            if self._clock.now_s() >= next_line_s:
                next_line_s += WAITING_LOG_S
                log.info("waiting for a decode worker to be ready: %s", missing)
            await self._clock.sleep(READY_POLL_S)

    async def _missing(self) -> str:
        """The reason why no decode worker is known to be ready; empty when one is, or none was asked for."""
        try:
            decode = (await self._connector.fleet()).decode
            is_wanted = (await self._connector.desired()).num_decode_workers != 0
        except NothingToPlan:
            return ""
        except Exception as error:  # whatever the store raises: it is asked again
            return f"the fleet is not known: {str(error) or type(error).__name__}"
        if decode.ready or decode.asleep or not is_wanted:
            return ""
        if decode.present:
            return f"{decode.starting} starting, {decode.backoff} before a restart, {decode.failed} failed"
        component, namespace = self._settings.decode_component, self._settings.namespace
        return f"no {component} is registered in namespace {namespace}"

    def now_s(self) -> float:
        return self._clock.now_s()

    async def desired(self) -> DesiredCounts | None:
        try:
            return await self._connector.desired()
        except DynaplanError as error:
            log.debug("whether scaling has ended is not known: %s", error)
            return None

    async def pull_traffic(self) -> None:
        if self._traffic:
            await self._traffic.pull()

    async def pull_load(self) -> Sample:
        sample = await self._observer.pull()
        for recorder in self._recorders:
            recorder.record_sample(sample)
        return sample

    async def observe(self, load: AverageLoad, state: PlannerState) -> Observation:
        """Return the observation of the interval; ``unknown`` says why, where the fleet is not known."""
        failure = self._failure
        try:
            fleet, desired = await self._connector.fleet(), await self._connector.desired()
            holds = await self._connector.holds()
            change = await self._publisher.asked() if self._publisher else None
        except DynaplanError as error:
            observation = Observation(
                self._clock.now_s(), load=load, unknown=self._why_unknown(error), failure=failure
            )
        else:
            self._unknown = ""
            self._warn_of_short_interval(fleet)
            observation = Observation(self._clock.now_s(), fleet, desired, load, failure=failure, holds=holds)
            observation = replace(observation, option_change=change)
        observation = replace(observation, learnt=self._observer.learnt())
        if self._traffic:
            observation = await self._with_traffic(observation, self._traffic)
        if self._backtester:
            observation = replace(observation, backtest=self._backtester.observe(observation, state))
        return observation

    def _why_unknown(self, error: DynaplanError) -> str:
        """Return why the fleet is not known, and say so in the log when that is new."""
        unknown = str(error.args[0]) or type(error).__name__
        if not isinstance(error, NothingToPlan):
            log.warning("the fleet is not known: %s", error)
        elif unknown != self._unknown:
            log.info("nothing to plan: %s", unknown)
        self._unknown = unknown
        return unknown

    def _warn_of_short_interval(self, fleet: FleetCounts) -> None:
        """Say once, where decisions wait for each other, that the interval is shorter than a start."""
        settings, interval_s = self._settings, self._settings.adjustment_interval_s
        startup_s = startup_time_s(settings, (fleet.prefill.startup_s, fleet.decode.startup_s))
        is_waiting = not settings.is_by_targets or settings.waits_with_targets
        if self._is_warned or not is_waiting or startup_s <= interval_s:
            return
        self._is_warned = True
        log.warning(
            "adjustment-interval is %g s, and a worker takes %.0f s to start: no decision is made meanwhile, "
            "so decisions come later than the interval says; set one that is longer than a start",
            interval_s,
            startup_s,
        )

    async def _with_traffic(self, observation: Observation, watch: TrafficObserver) -> Observation:
        fleet = observation.fleet
        startup_s = startup_time_s(self._settings, (fleet.prefill.startup_s, fleet.decode.startup_s))
        traffic, foresight = await watch.observe(startup_s)
        return replace(observation, traffic=traffic, foresight=foresight, startup_s=startup_s)

    def record(
        self, before: PlannerState, observation: Observation, decision: Decision, after: PlannerState
    ) -> None:
        """Log the decision, and hand its record to the recorders."""
        level = logging.INFO if decision.is_change else logging.DEBUG
        log.log(level, "%s -> %s: %s", decision.current, decision.desired, decision.reason)
        if decision.is_withheld:
            log.info("scaling is needed, and not possible now: %s", decision.reason)
        elif not decision.is_change and has_data(observation):
            log.info(NO_SCALING, decision.current.prefill, decision.current.decode)
        record = DecisionRecord(self._wall_time(), self._settings, before, observation, decision, after)
        for recorder in self._recorders:
            recorder.record_decision(record)
        self._failure = ""

    async def tune(self, tuning: Tuning) -> None:
        """Publish the tuning; with ``no-operation`` it is only recorded."""
        if self._publisher and not self._settings.no_operation:
            await self._publisher.publish(tuning)

    async def change_option(self, change: OptionChange) -> None:
        """Have the fleet plugin change the option, one worker after another."""
        if self._publisher:
            log.info("engine option: %s", change)
            await self._publisher.ask(change)

    async def apply(self, decision: Decision) -> bool:
        """Ask the connector for the desired counts; False if it refuses.

        With ``no-operation`` nothing is asked for: False, too.
        """
        if self._settings.no_operation:
            log.info("no-operation: %s would have been asked for", decision.desired)
            return False
        try:
            identifier = await self._connector.apply(decision)
        except Exception as error:
            self._failure = str(error) or type(error).__name__
            log.warning("not carried out: %s", self._failure, exc_info=not isinstance(error, DynaplanError))
            return False
        log.info("decision %d asks for %s", identifier, decision.desired)
        return True

    def _mode(self) -> str:
        settings = self._settings
        model = f", model {settings.served_model_name}" if settings.served_model_name else ""
        return model + ("; no-operation: nothing will be changed" if settings.no_operation else "")
