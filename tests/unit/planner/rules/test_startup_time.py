"""The start-up time of a decision: the setting's, or the slower role's."""

from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.rules.cycle import startup_time_s


def test_without_a_setting_the_slower_role_counts() -> None:
    assert startup_time_s(PlannerSettings(), [30.0, 45.0]) == 45.0


def test_a_setting_counts_whatever_was_measured() -> None:
    assert startup_time_s(replace(PlannerSettings(), startup_time_s=0.0), [30.0, 45.0]) == 0.0
