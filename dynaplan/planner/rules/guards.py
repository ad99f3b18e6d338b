"""Guards: objections to a change of the number of workers. Each returns why not, or "" to let it pass.

Removals by thresholds are asked about minimum, floor, grace (decode only) and consolidation, additions about
failures, missing workers and budget. Targets look at minimum, budget and failures only (``sla_policy.py``).
"""

from __future__ import annotations

import math

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import PlannerState

RELATIVE_TOLERANCE = 1e-9
"""Relative margin: a projected load this near to a threshold counts as over it, as a measured one may be."""


def is_waiting(settings: PlannerSettings, state: PlannerState, desired: DesiredCounts, at_s: float) -> bool:
    """Tell whether a decision is being carried out, for less than ``scaling-timeout`` so far.

    The time counts from when the state noted the decision as pending.
    """
    return desired.is_pending and at_s - state.pending_since_s < settings.scaling_timeout_s


def against_minimum(settings: PlannerSettings, role: Role, workers: int, gpus: int) -> str:
    """Object to removing one of ``workers``, of ``gpus`` GPUs each, that the role needs as its minimum."""
    least = min_workers(settings, gpus)
    return "" if workers > least else f"{least} is the least number of {role.value} workers"


def min_workers(settings: PlannerSettings, gpus: int) -> int:
    """Return the least number of workers of a role, each of which has that many GPUs."""
    return settings.min_endpoint or math.ceil(settings.min_gpu_budget / gpus)


def against_floor(role: Role, workers: int, floor: int) -> str:
    """Object to removing one of ``workers`` that the targets need."""
    return "" if workers > floor else f"the targets need {floor} {role.value} workers"


def against_grace(state: PlannerState) -> str:
    """Object to removing a decode worker when one was added lately and still fills its KV cache."""
    left = state.decode_grace_left
    return f"a decode worker was added lately: {left} more interval(s) of grace" if left > 0 else ""


def against_consolidation(
    settings: PlannerSettings, load: float, up: float, serving: int, workers: int
) -> str:
    """Object to removing one of ``workers`` when the others would then be over the scale-up threshold.

    ``load`` is per worker, over the ``serving`` ones; the load of the removed worker spreads over the
    others: load x N / (N - 1). Without this guard such a worker is removed and added in turns.
    """
    if not settings.consolidation_guard:
        return ""
    rest = min(serving, workers) - 1
    if rest < 1:
        return "no other worker serves now"
    after = load * serving / rest
    if after <= up * (1 - RELATIVE_TOLERANCE):
        return ""
    return f"the other {rest} would then be at {after:.3g}, over the scale-up threshold {up:g}"


def failure_reason(fleet: FleetCounts, role: Role) -> str:
    """Object to adding a worker to a role in which several have failed permanently.

    One may have had a bad GPU, which another worker need not get; several probably share their fault with
    the next.
    """
    failed = _counts(fleet, role).failed
    return f"{failed} {role.value} workers failed: `dynaplan status` says why" if failed > 1 else ""


def against_missing(fleet: FleetCounts, current: PoolSizes, role: Role) -> str:
    """Object to adding a worker while fewer of the role are there than are asked for."""
    has, asked = _counts(fleet, role).present, current.of(role)
    return f"of the {asked} {role.value} workers asked for there are {has}" if has < asked else ""


def against_budget(
    settings: PlannerSettings, fleet: FleetCounts, current: PoolSizes, targets: PoolSizes, role: Role
) -> str:
    """Object to adding a worker of the role to ``targets`` beyond the GPU budget, or the GPUs of the box.

    Draining workers, and workers beyond the desired number, hold their GPUs until they are gone.
    """
    held = gpus_in_use(settings, fleet, current, targets)
    wanted = held + gpus_of(settings, fleet, role)
    if held > settings.max_gpu_budget:
        return f"{held} GPUs are in use already, over the budget of {settings.max_gpu_budget}"
    if wanted > settings.max_gpu_budget:
        budget = settings.max_gpu_budget
        return f"{wanted} GPUs would be over the budget of {budget} ({held} in use or leaving)"
    on_box = sum(
        _workers(fleet, current, targets, scaled) * _counts(fleet, scaled).gpus for scaled in SCALED_ROLES
    )
    if fleet.gpus_total and on_box + _counts(fleet, role).gpus > fleet.gpus_total:
        return f"the box has {fleet.gpus_total} GPUs, {on_box:g} of them in use or leaving"
    return ""


def gpus_in_use(settings: PlannerSettings, fleet: FleetCounts, current: PoolSizes, targets: PoolSizes) -> int:
    """Return the GPUs held once ``targets`` are reached while everything that leaves still holds its own.

    ``current`` are the counts asked for until now. A worker that this decision removes counts as gone: the
    executor drains first and starts then.
    """
    return sum(
        _workers(fleet, current, targets, role) * gpus_of(settings, fleet, role) for role in SCALED_ROLES
    )


def gpus_of(settings: PlannerSettings, fleet: FleetCounts, role: Role) -> int:
    """Return the GPUs of one worker: the configured number or the published one, the larger."""
    configured = settings.prefill_engine_num_gpu if role is Role.PREFILL else settings.decode_engine_num_gpu
    return max(configured, math.ceil(_counts(fleet, role).gpus))


def _workers(fleet: FleetCounts, current: PoolSizes, targets: PoolSizes, role: Role) -> int:
    counts = _counts(fleet, role)
    unasked = max(0, counts.holding - current.of(role))
    return targets.of(role) + counts.draining + unasked


def _counts(fleet: FleetCounts, role: Role) -> WorkerCounts:
    return fleet.prefill if role is Role.PREFILL else fleet.decode
