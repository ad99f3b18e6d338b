"""The rhythm of planning.

The start-up time of a decision: the setting's, or the slower role's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.rules.cycle import PlanningCycle, startup_time_s


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
