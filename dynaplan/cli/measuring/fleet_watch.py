"""The fleet of a deployment while it is measured: the GPUs that it holds, and the planner's changes."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from dynaplan.fleet.desired_counts import SCALED_ROLES
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role
from dynaplan.planner.model.decisions import DecisionRecord
from dynaplan.simulation.timeline import ChangeCount
from dynaplan.util.errors import DeploymentError, UserError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

MOST_RECORDS = 10_000
"""The planner's last records that are looked through for changes."""


class FleetWatch:
    """Adds up GPU-seconds from one ``look`` to the next; made at the beginning of a measurement."""

    def __init__(self, found: RunningDeployment, now_s: float) -> None:
        self._found = found
        self._began = datetime.now().astimezone()
        self._looked_s = now_s
        self._held = _held(found)
        self.gpu_s = 0.0
        self.is_disaggregated = any(worker.role is Role.PREFILL for worker in found.workers)

    def look(self, now_s: float) -> None:
        """Read the statefile; a deployment that has ended holds nothing more."""
        from dynaplan.fleet.deployments import find_deployment

        self.gpu_s += self._held * (now_s - self._looked_s)
        self._looked_s = now_s
        try:
            self._held = _held(find_deployment(self._found.namespace))
        except DeploymentError:
            self._held = 0.0

    def changes(self) -> ChangeCount:
        """Return the planner's changes since the beginning."""
        from dynaplan.planner import factory

        counted = ChangeCount()
        for document in factory.recent_decisions(self._found.log_dir / "planner", MOST_RECORDS):
            try:
                record = DecisionRecord.from_json(document)
                at = datetime.fromisoformat(record.wall_time)
            except (KeyError, TypeError, ValueError, AttributeError, UserError):
                continue
            if at >= self._began and record.decision.is_change and not record.settings.no_operation:
                since_s = (at - self._began).total_seconds()
                counted.count(record.decision.current, record.decision.desired, since_s)
        return counted


def _held(found: RunningDeployment) -> float:
    """Return the GPUs that the workers of the scaled roles hold."""
    scaled = [worker for worker in found.workers if worker.role in SCALED_ROLES]
    return float(sum(each.gpu_request for each in scaled if each.state in HOLDS_GPUS))
