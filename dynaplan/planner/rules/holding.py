"""Holds as the last step of a decision, whatever the policy: bounds that a person has set.

A hold goes before thresholds, targets, minimums and guards. One that keeps or adds workers takes room in the
GPU budget from the other role, down to that role's minimum or its own hold; where even that is not enough the
hold is kept and the budget is exceeded, as ``dynaplan scale`` may. One that keeps a role small leaves its
room to the other.
"""

from __future__ import annotations

from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.planner.model.observation import Observation
from dynaplan.planner.model.targets import Step
from dynaplan.planner.rules.sla_policy import limits_of
from dynaplan.planner.sizing.gpu_budget import fit


def hold_within_bounds(
    settings: PlannerSettings, observation: Observation, current: Targets, wanted: Targets
) -> list[Step]:
    """Return the step from the ``wanted`` numbers to those within the holds; none where nothing is held.

    A deployment without prefill workers (``current`` has none) ignores a hold of them.
    """
    holds = observation.holds.beside(current)
    if not holds.by_role:
        return []
    after = _within(settings, observation, holds, current, wanted)
    return [Step("held", wanted, after, _why(holds, wanted, after))]


def _within(
    settings: PlannerSettings, observation: Observation, holds: RoleHolds, current: Targets, wanted: Targets
) -> Targets:
    bounded = holds.bounded(wanted)
    if not any(bounded.of(role) > wanted.of(role) for role in SCALED_ROLES):
        return bounded
    limits = limits_of(settings, observation, current)
    least = Targets(min(limits.least.prefill, bounded.prefill), min(limits.least.decode, bounded.decode))
    least = holds.bounded(least)
    return fit(bounded, replace(limits, least=least)) or least


def _why(holds: RoleHolds, wanted: Targets, after: Targets) -> str:
    parts = []
    for role in SCALED_ROLES:
        hold, before, now = holds.of(role), wanted.of(role), after.of(role)
        not_wanted = f", instead of {before}" if before != now else ""
        if hold:
            parts.append(f"{role.value} is {hold}{not_wanted}")
        elif not_wanted:
            parts.append(f"the GPU budget then has room for {role.value} {now}{not_wanted}")
    return "; ".join(parts)
