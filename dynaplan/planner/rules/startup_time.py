"""The start-up time that a decision counts with, live, simulated and replayed."""

from __future__ import annotations

from collections.abc import Iterable

from dynaplan.config.settings.planner import PlannerSettings


def startup_time_s(settings: PlannerSettings, measured_s: Iterable[float]) -> float:
    """Return the seconds from a worker's start to ready: the setting, or else the longest measured time.

    Both pools are sized for the same moment, so the slower role counts.
    """
    if settings.startup_time_s is not None:
        return settings.startup_time_s
    return max(measured_s)
