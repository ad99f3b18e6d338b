"""The components that a planner scales, and the numbers that it is told to set."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.fleet.counts import FleetCounts
from dynaplan.fleet.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role


@dataclass(frozen=True)
class ScaledComponent:
    """A component of one role; ``models`` are the names that its workers serve, empty when not known."""

    role: Role
    name: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True)
class DeployedComponents:
    """The components of a deployment; ``missing`` says why it is not ready, "" when it is."""

    components: tuple[ScaledComponent, ...] = ()
    missing: str = ""

    def of(self, role: Role) -> tuple[ScaledComponent, ...]:
        """Return the components of that role."""
        return tuple(each for each in self.components if each.role is role)


@dataclass(frozen=True)
class TargetReplica:
    """A number of workers that a role is to have."""

    sub_component_type: Role
    desired_replicas: int


def missing_workers(fleet: FleetCounts, desired: DesiredCounts) -> str:
    """Say which role has fewer ready workers than are asked for; "" when none, and one at least is ready."""
    lines = []
    for role in SCALED_ROLES:
        counts = fleet.prefill if role is Role.PREFILL else fleet.decode
        ready, asked = counts.ready + counts.asleep, desired.of(role)
        wanted = asked if asked >= 0 else counts.present
        if ready < wanted:
            lines.append(f"{ready} of {wanted} {role.value} workers are ready")
    if not lines and not fleet.prefill.ready + fleet.decode.ready + fleet.decode.asleep:
        return "no worker is ready"
    return "; ".join(lines)
