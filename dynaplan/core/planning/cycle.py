"""The rhythm of planning: when to pull, when to decide, and when to wait for a decision to be carried out.

The live planner and the simulator use the same cycle; they differ in the source of samples.
"""

from __future__ import annotations

from dynaplan.core.planning import guards
from dynaplan.core.planning.deciding import decide, not_carried_out
from dynaplan.core.planning.load_policy import averaged
from dynaplan.core.planning.sla_policy import SlaModel
from dynaplan.domain.planning.decisions import Decision, PlannerState
from dynaplan.domain.planning.observation import Load, Observation, Sample
from dynaplan.domain.planning.scaling import DesiredCounts
from dynaplan.domain.settings.planner import PlannerSettings


class PlanningCycle:
    """One planner's intervals. Times are monotonic seconds. ``state`` is what is known from before.

    With the policy ``load`` nothing is pulled and nothing decided while a decision is being carried out
    (``is_waiting``): the next interval begins when it is acknowledged, or after ``scaling-timeout``.
    Targets are planned for in even intervals, whatever is being carried out.
    """

    def __init__(
        self, settings: PlannerSettings, model: SlaModel | None = None, state: PlannerState | None = None
    ) -> None:
        self._settings = settings
        self._model = model
        self._samples: list[Sample] = []
        self._began_s = 0.0
        self.before = self.state = state or PlannerState()
        self.is_scaling = True

    def begin(self, now_s: float) -> None:
        """Begin an interval at ``now_s``: samples of the last one are forgotten."""
        self._samples = []
        self._began_s = now_s

    def saw(self, desired: DesiredCounts, now_s: float) -> None:
        """Note the desired counts; when scaling has ended with that, begin a new interval."""
        self.state = self.state.noting(desired, now_s)
        self.is_scaling = guards.is_waiting(self._settings, self.state, desired, now_s)
        if not self.is_scaling and not self._settings.is_by_targets:
            self.begin(now_s)

    @property
    def is_waiting(self) -> bool:
        """True while the planner waits for a decision to be carried out."""
        return self.is_scaling and not self._settings.is_by_targets

    def add(self, sample: Sample) -> None:
        """Add one metric pull to the samples that the interval's decision averages."""
        self._samples.append(sample)

    def is_due(self, now_s: float) -> bool:
        """Tell whether the interval is over. The pull nearest to its end decides, however late pulls are."""
        slack_s = self._settings.metric_pulling_interval_s / 2
        return now_s - self._began_s >= self._settings.adjustment_interval_s - slack_s

    @property
    def load(self) -> Load:
        """The pulls of this interval as one load."""
        return averaged(self._samples)

    def decide(self, observation: Observation) -> Decision:
        """Decide at the end of this interval."""
        self.before = self.state
        self.state, decision = decide(self._settings, self.state, observation, self._model)
        self.is_scaling |= observation.desired.is_pending
        return decision

    def asked(self) -> None:
        """Note that the decision was asked for: it is being carried out now."""
        self.is_scaling = True

    def not_carried_out(self) -> None:
        """Note that the decision was not carried out, and never will be."""
        self.state = not_carried_out(self.before)
