"""The rhythm of planning.

What is remembered of a decision that was not applied. The start-up time of a decision: the setting's, or the
slower role's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import Sample
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.planner.model import Decision, ErrorBudget, Observation, PlannerState, Tuning
from dynaplan.planner.rules.cycle import PlanningCycle, startup_time_s
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.situations import SEEDS, interval


def intervals_s(adjustment_s: float, pulling_s: float, late_s: float, took_s: float) -> list[float]:
    """Between decisions, when every pull ends so late, and a decision takes so long."""
    options = {"adjustment-interval": adjustment_s, "metric-pulling-interval": pulling_s}
    cycle = PlanningCycle(PlannerSettings.from_options(options))
    cycle.begin(took_s)
    decided_s = []
    for pull in range(1, 200):
        now_s = pull * pulling_s + late_s
        if cycle.is_due(now_s):
            decided_s.append(now_s)
            cycle.begin(now_s + took_s)
    return [after - before for before, after in pairwise(decided_s)]


@pytest.mark.parametrize(("adjustment_s", "pulling_s"), [(30.0, 1.0), (2.0, 0.25), (10.0, 5.0), (1.0, 1.0)])
def test_an_interval_is_as_long_as_it_was_set_although_pulls_and_decisions_take_time(
    adjustment_s: float, pulling_s: float
) -> None:
    intervals = intervals_s(adjustment_s, pulling_s, 0.01, 0.05)

    assert intervals == pytest.approx([adjustment_s] * len(intervals))


def test_an_interval_that_is_no_multiple_of_the_pulls_ends_at_the_nearest_one() -> None:
    assert intervals_s(10.0, 4.0, 0.0, 0.0)[0] == pytest.approx(8.0)
    assert intervals_s(11.0, 4.0, 0.0, 0.0)[0] == pytest.approx(12.0)


def test_without_a_setting_the_slower_role_counts() -> None:
    assert startup_time_s(PlannerSettings(), [30.0, 45.0]) == 45.0


def test_a_setting_counts_whatever_was_measured() -> None:
    assert startup_time_s(replace(PlannerSettings(), startup_time_s=0.0), [30.0, 45.0]) == 0.0


class Refusing:
    """A deployment that refuses every decision: the same is observed in interval after interval."""

    def __init__(self, settings: PlannerSettings, observation: Observation) -> None:
        self.settings, self.observation = settings, observation
        self.passed_s = 0.0
        self.decided: list[tuple[PlannerState, Decision, PlannerState]] = []

    async def pass_intervals(self, number: int, state: PlannerState | None = None) -> None:
        model = targets.model(self.settings) if self.settings.is_by_targets else None
        cycle = PlanningCycle(self.settings, model, state)
        for _ in range(number):
            self.passed_s += self.settings.adjustment_interval_s
            await cycle.tick(self)

    def now_s(self) -> float:
        return self.passed_s

    async def desired(self) -> DesiredCounts:
        return self.observation.desired

    async def pull_traffic(self) -> None:
        pass

    async def pull_load(self) -> Sample:
        return Sample(self.passed_s)

    async def observe(self, *_: object) -> Observation:
        return replace(self.observation, at_s=self.passed_s)

    def record(self, before: PlannerState, _: Observation, decision: Decision, after: PlannerState) -> None:
        self.decided.append((before, decision, after))

    async def tune(self, _: Tuning) -> None:
        pass

    async def apply(self, _: Decision) -> bool:
        return False


async def test_a_worker_that_was_refused_gives_no_grace() -> None:
    deployment = Refusing(replace(SEEDS, adjustment_interval_s=10.0), interval(1, 1, 0.95))
    await deployment.pass_intervals(4, PlannerState(decode_grace_left=2))  # the first is only looked at
    assert all(decision.is_change for _, decision, _ in deployment.decided)
    assert [before.decode_grace_left for before, _, _ in deployment.decided] == [2, 1, 0]


async def test_a_refused_decision_keeps_the_interval_s_error_budget_and_corrections() -> None:
    settings = replace(targets.SETTINGS, no_correction=False)
    deployment = Refusing(settings, targets.planned_interval(1, 1, [40.0]))
    await deployment.pass_intervals(2)
    (_, decision, after), (following, _, _) = deployment.decided
    assert decision.is_change
    assert after.error_budget != ErrorBudget()
    assert (following.error_budget, following.corrections) == (after.error_budget, after.corrections)
