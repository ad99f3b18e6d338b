"""The deployment, the trace and the policies that a user asks ``dynaplan simulate`` to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.fleet.counts import Targets
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.service import ANY_QUEUE

EVERY_PROMPT_REMOTE = DisaggregationSettings(is_on=True, max_prefill_queue_size=ANY_QUEUE)
"""The default: prefill workers compute every prompt, because one on a decode worker delays all its tokens."""


@dataclass(frozen=True)
class SimulateOptions:
    """One simulation for each of ``policies``, all of the same trace and deployment. Times are in seconds.

    ``trace`` is a file or made-up load, at ``rate_scale`` times its rate; of its arrivals only those of the
    last ``last_s`` count, where that is given. ``first`` are the workers at the beginning; without it there
    is one of each role, or the workers of a static policy.
    ``engine`` are options of the simulated engine, ``prefill_engine`` those of prefill workers where these
    differ, ``planner`` options of the planner. ``disaggregation`` counts only with prefill workers.
    The frontends refuse requests while ``max_waiting_requests`` wait for their first token, and give a
    remote prefill up after ``prefill_wait_s``.
    """

    trace: str
    policies: tuple[str, ...] = ("load",)
    gpus: int = 8
    is_disaggregated: bool = True
    startup_time_s: float = 60.0
    rate_scale: float = 1.0
    last_s: float | None = None
    slo: Slo = field(default_factory=Slo)
    first: Targets | None = None
    routing: SimulatedRouting = field(default_factory=SimulatedRouting)
    seed: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, Any] = field(default_factory=dict)
    prefill_engine: Mapping[str, Any] | None = None
    disaggregation: DisaggregationSettings = EVERY_PROMPT_REMOTE
    max_waiting_requests: int | None = None
    prefill_wait_s: float | None = None

    def engine_of(self, role: Role) -> Mapping[str, Any]:
        """Return the options of that role's engines."""
        is_own = role is Role.PREFILL and self.prefill_engine is not None
        return (self.prefill_engine or {}) if is_own else self.engine
