"""The deadline of queued prompts: one that a section sets, or else the target that the Planner plans for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dynaplan.config.service_config import kebab_keys
from dynaplan.config.settings.routing import DisaggregationSettings

DEADLINE = "prefill-deadline"

OF_PLANNER = ("policy", "ttft", DEADLINE)
"""Options of the Planner that frontends read where no section of theirs sets a deadline."""


class PrefillDeadline(NamedTuple):
    """Milliseconds after its arrival that a queued prompt is dispatched by; 0: in the order of arrival.

    ``origin`` is the option that says it; empty where none does.
    """

    ms: float = 0.0
    origin: str = ""

    def __str__(self) -> str:
        """Return the order in words, for a person."""
        return f"by deadline, {self.ms:g} ms ({self.origin})" if self.ms else "in the order of arrival"


def prefill_deadline(said: DisaggregationSettings, planner: Mapping[str, Any]) -> PrefillDeadline:
    """Return the deadline that holds: what is ``said``, else the target of the Planner with these options.

    Only a planner that plans for targets has one, and only prompts for prefill workers are queued. Raises
    ConfigError.
    """
    if said.prefill_deadline_ms is not None:
        return PrefillDeadline(said.prefill_deadline_ms, DEADLINE)
    if not said.is_on:
        return PrefillDeadline()
    from dynaplan.config.settings.planner import PlannerSettings  # much, and workers have no use for it

    given = kebab_keys(planner)
    plan = PlannerSettings.from_options({name: given[name] for name in OF_PLANNER if name in given})
    if plan.prefill_deadline_ms is not None:
        return PrefillDeadline(plan.prefill_deadline_ms, f"Planner.{DEADLINE}")
    return PrefillDeadline(plan.ttft_ms, "Planner.ttft") if plan.is_by_targets else PrefillDeadline()
