"""The planner's next decision on counts that were set by hand: when it comes, and its outcome."""

from __future__ import annotations

import time
from datetime import datetime
from typing import TYPE_CHECKING

from dynaplan.fleet.counts import Targets
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model.decisions import DecisionRecord
from dynaplan.planner.rules.preview import is_known, next_decision
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import UserError

if TYPE_CHECKING:
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.planner.rules.sla_policy import SlaModel


def planner_settings(found: RunningDeployment) -> PlannerSettings | None:
    """Return the settings of the planner that scales this deployment; None when none does."""
    from dynaplan.config.planner import settings_of
    from dynaplan.config.service_config import CONFIG_VARIABLE, ServiceConfig, section_options

    planner = next((each.component for each in found.workers if each.role is Role.PLANNER), "")
    if not planner:
        return None
    config = ServiceConfig.from_text(found.document["environment"].get(CONFIG_VARIABLE, ""))
    settings: PlannerSettings = settings_of(section_options(config, planner))
    return None if settings.no_operation else settings


def planners_part(
    found: RunningDeployment,
    settings: PlannerSettings,
    counts: DesiredCounts,
    holds: RoleHolds,
    *,
    is_decision: bool = True,
) -> str:
    """Return when the planner decides again, and what it would ask for with the load that it saw last.

    ``is_decision`` tells that the numbers were asked for just now, and not only a hold released.
    """
    last = _last_record(found)
    sentence = f"The planner decides again {_when(settings, last, is_decision=is_decision)}"
    if last is None or not is_known(last.observation):
        return f"{sentence}, and may change that."
    workers = Targets(max(0, counts.num_prefill_workers), max(0, counts.num_decode_workers))
    try:
        decision = next_decision(last, workers, holds.in_force(time.time(), wall_clock), _model(last))
    except (UserError, OSError, ValueError):
        return f"{sentence}, and may change that."
    if not decision.is_change:
        return f"{sentence}. With the load that it saw last it would keep that, and may change it later."
    changed = [role for role in SCALED_ROLES if decision.desired.of(role) != decision.current.of(role)]
    other = ", ".join(f"{role.value}={decision.desired.of(role)}" for role in changed)
    return f"{sentence}. With the load that it saw last it would ask for {other}: {decision.reason}."


def _when(settings: PlannerSettings, last: DecisionRecord | None, *, is_decision: bool) -> str:
    interval_s = settings.adjustment_interval_s
    if not settings.is_by_targets and is_decision:
        return f"{interval_s:g} s after this is carried out"
    if last:
        since_s = (datetime.now().astimezone() - datetime.fromisoformat(last.wall_time)).total_seconds()
        if 0 <= since_s < interval_s:
            return f"in {interval_s - since_s:.0f} s"
    return f"within {interval_s:g} s"


def _last_record(found: RunningDeployment) -> DecisionRecord | None:
    from dynaplan.planner import factory

    for document in factory.recent_decisions(found.log_dir / "planner", 1):
        try:
            record = DecisionRecord.from_json(document)
            datetime.fromisoformat(record.wall_time)
        except (KeyError, TypeError, ValueError, AttributeError, UserError):
            return None
        return record
    return None


def _model(last: DecisionRecord) -> SlaModel | None:
    from dynaplan.planner import factory

    return factory.sla_model(last.settings, {}) if last.settings.is_by_targets else None
