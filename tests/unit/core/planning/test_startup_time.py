"""The start-up time of a decision: the setting's, or the slower role's."""

from dataclasses import replace

from dynaplan.core.planning.startup_time import startup_time_s
from dynaplan.domain.settings.planner import PlannerSettings


def test_without_a_setting_the_slower_role_counts() -> None:
    assert startup_time_s(PlannerSettings(), [30.0, 45.0]) == 45.0


def test_a_setting_counts_whatever_was_measured() -> None:
    assert startup_time_s(replace(PlannerSettings(), startup_time_s=0.0), [30.0, 45.0]) == 0.0
