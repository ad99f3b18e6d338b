"""The fleet plugin as its process loads it: its event hook gets a planner's decisions, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from dynaplan.contract.hook_events import DecisionEventSource
from dynaplan.fleet.plugin.plugin import ReconcilerPlugin
from dynaplan.planner.recorders.decision_log import all_recent_records

RECORDS_OF_A_POLL = 10
"""The planner's last records in which one poll finds its events: more than a planner writes meanwhile."""


class FleetPlugin(ReconcilerPlugin):
    """The fleet plugin of a deployment whose planner logs below the deployment's logs."""

    def decision_events(self, planner_dir: Path) -> DecisionEventSource:
        """Return the events among the decisions that planners have recorded there."""
        from dynaplan.planner.decision_events import RecordedDecisionEvents  # much, for those who have a hook

        return RecordedDecisionEvents(partial(all_recent_records, planner_dir, RECORDS_OF_A_POLL))
