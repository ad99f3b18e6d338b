"""Short ways to have an interval decided for targets, with settled workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import Observation, PlannerState, Sizing
from dynaplan.planner.rules.sla_policy import size_for_slo
from tests.unit.planner.rules.targets import SETTINGS, foreseen, model, planned_interval

MODEL = model()
ONE_EACH = PoolSizes(1, 1)
MANY = PoolSizes(3, 2)
"""More than a little load needs."""
STARTUP_S = 60.0


def decided(
    observation: Observation,
    current: PoolSizes,
    state: PlannerState | None = None,
    settings: PlannerSettings = SETTINGS,
) -> tuple[PlannerState, Sizing]:
    return size_for_slo(MODEL, settings, state or PlannerState(), observation, current)


def seen(current: PoolSizes, requests_per_s: Sequence[float], startup_s: float = STARTUP_S) -> Observation:
    """Settled workers; the first of the rates was seen, all of them are forecast."""
    observation = planned_interval(current.prefill, current.decode, requests_per_s, startup_s=startup_s)
    return replace(observation, foresight=foreseen(requests_per_s))


def why(sizing: Sizing, stage: str) -> str:
    return next((step.why for step in sizing.steps if step.stage == stage), "")
