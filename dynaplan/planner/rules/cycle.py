"""The planning loop: when to pull, when to decide, and when to wait for a decision to be carried out.

The live planner and the simulator run this same loop, each on a ``PlannedDeployment`` of its own. Its methods
are coroutines because a live deployment waits for answers; those of a simulated one never wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import Sample
from dynaplan.contract.option_changes import OptionChange
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.planner.model import AverageLoad, Decision, Observation, PlannerState, Tuning
from dynaplan.planner.rules import guards
from dynaplan.planner.rules.decision import OwnPolicy, decide
from dynaplan.planner.rules.load_policy import average_load
from dynaplan.planner.rules.sla_policy import PerformanceModel


class PlannedDeployment(Protocol):
    """A deployment, live or simulated, as the planning loop reads and scales it."""

    def now_s(self) -> float:
        """Return monotonic seconds."""
        ...

    async def desired(self) -> DesiredCounts | None:
        """Return the desired counts and whether they are carried out; None where that is not known now."""
        ...

    async def pull_traffic(self) -> None:
        """Read the traffic of a metric pull; a policy that does not plan for targets needs none."""
        ...

    async def pull_load(self) -> Sample:
        """Return the load of a metric pull."""
        ...

    async def observe(self, load: AverageLoad, state: PlannerState) -> Observation:
        """Return the observation of the interval that ends now, whose averaged pulls are ``load``.

        ``state`` is the planner's memory so far: a backtest is made with the corrections in it.
        """
        ...

    def record(
        self, before: PlannerState, observation: Observation, decision: Decision, after: PlannerState
    ) -> None:
        """Note a decision, with the states before and after it."""
        ...

    async def tune(self, tuning: Tuning) -> None:
        """Apply these limits (running requests, local prefill) to running workers; never raises."""
        ...

    async def change_option(self, change: OptionChange) -> None:
        """Ask for a change of an engine's option; never raises. One that is lost is asked for once more."""
        ...

    async def apply(self, decision: Decision) -> bool:
        """Ask for the desired counts; False if they were not asked for, and will not be."""
        ...


class PlanningCycle:
    """One planner's intervals. Times are monotonic seconds. ``state`` is that of the last planner, if any.

    With the policy ``load``, and with one of the user's own, no load is pulled and nothing decided while a
    decision is being carried out (``is_waiting``): the next interval begins when it is acknowledged, or after
    ``scaling-timeout``. Targets are planned for in even intervals, whatever is being carried out.
    """

    def __init__(
        self,
        settings: PlannerSettings,
        model: PerformanceModel | None = None,
        state: PlannerState | None = None,
        own_policy: OwnPolicy | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._own_policy = own_policy
        self._samples: list[Sample] = []
        self._began_s = 0.0
        self._state = state or PlannerState()
        self._is_scaling = True

    def begin(self, now_s: float) -> None:
        """Begin an interval at ``now_s``, without the samples of the last one."""
        self._samples = []
        self._began_s = now_s

    async def tick(self, deployment: PlannedDeployment) -> None:
        """Make a metric pull, and at the end of an interval a decision."""
        if self._is_scaling:
            desired = await deployment.desired()
            if desired is not None:
                self._note(desired, deployment.now_s())
        await deployment.pull_traffic()
        if not self._is_waiting:
            self._samples.append(await deployment.pull_load())
        if self.is_due(deployment.now_s()):
            try:
                await self._adjust(deployment)
            finally:
                self.begin(deployment.now_s())

    def is_due(self, now_s: float) -> bool:
        """Tell whether the interval is over. The pull nearest to its end decides, however late pulls are."""
        slack_s = self._settings.metric_pulling_interval_s / 2
        return now_s - self._began_s >= self._settings.adjustment_interval_s - slack_s

    @property
    def _is_waiting(self) -> bool:
        """True while the planner waits for a decision to be carried out."""
        return self._is_scaling and not self._settings.is_by_targets

    def _note(self, desired: DesiredCounts, now_s: float) -> None:
        """Note the desired counts; by thresholds, begin an interval once scaling is done or overdue."""
        self._state = self._state.note_pending(desired, now_s)
        self._is_scaling = guards.is_waiting(self._settings, self._state, desired, now_s)
        if not self._is_scaling and not self._settings.is_by_targets:
            self.begin(now_s)

    async def _adjust(self, deployment: PlannedDeployment) -> None:
        before = self._state
        observation = await deployment.observe(average_load(self._samples), before)
        self._state, decision = decide(self._settings, before, observation, self._model, self._own_policy)
        self._is_scaling |= observation.desired.is_pending
        deployment.record(before, observation, decision, self._state)
        await deployment.tune(self._state.tuning)
        change = self._state.options.change
        if change and change.asked_s == observation.at_s:
            await deployment.change_option(change)
        if not decision.is_change:
            return
        if await deployment.apply(decision):
            self._is_scaling = True
        else:
            grace = before.after_interval().decode_grace_left  # none was added that would have one
            self._state = replace(self._state, decode_grace_left=grace)


def startup_time_s(settings: PlannerSettings, measured_s: Iterable[float]) -> float:
    """Return the seconds from a worker's start to ready: the setting, or else the longest measured time.

    Both pools are sized for the same moment, so the slower role counts.
    """
    if settings.startup_time_s is not None:
        return settings.startup_time_s
    return max(measured_s)
