"""The memory of a planner that starts: what the one before it knew of the promise."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.planner.bursts import burst_policy
from dynaplan.planner.model.decisions import DecisionRecord, PlannerState
from dynaplan.planner.sizing.error_budget import faded
from dynaplan.util.errors import UserError

log = logging.getLogger(__name__)


def remembered(
    documents: Sequence[Mapping[str, Any]], settings: PlannerSettings, now: datetime
) -> PlannerState:
    """Return the state to begin with, by the last of these records of decisions: its error budget, faded.

    What the learnt floor and the hedge know goes with it. Nothing is remembered of another promise, of
    records that cannot be read, and of a future one. ``now`` has a time zone.
    """
    begin = PlannerState()
    try:
        last = DecisionRecord.from_json(documents[-1])
        passed_s = (now - datetime.fromisoformat(last.wall_time)).total_seconds()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, UserError):
        return begin
    before, window_s = last.settings, settings.slo_window_s
    if not before.is_by_targets or not window_s or passed_s < 0 or _promise(before) != _promise(settings):
        return begin
    known, fade = last.next_state, math.exp(-passed_s / window_s)
    state = PlannerState(
        error_budget=faded(known.error_budget, passed_s, window_s),
        bursts=burst_policy.remembered(known.bursts, fade),
    )
    log.info(
        "the error budget goes on from %s: TTFT %+.0f, ITL %+.0f requests",
        last.wall_time,
        state.error_budget.ttft_requests,
        state.error_budget.itl_requests,
    )
    return state


def _promise(settings: PlannerSettings) -> tuple[object, ...]:
    """Return what a budget is about: it says nothing of another."""
    return settings.namespace, settings.served_model_name, settings.targets(), settings.slo_window_s
