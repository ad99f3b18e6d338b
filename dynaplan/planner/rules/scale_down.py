"""Patience: when workers that a size does not need may leave (``sizing: queueing``).

A worker that leaves and is wanted back is missing for a whole start-up time, so removing waits. L is the
start-up time, T the adjustment interval (seconds), *current* the number of workers asked for until now.

**All conditions of a removal** by targets, per role. A worker leaves where each allows it:

1. *Known data*: the fleet, the desired counts, the traffic of the interval (0 requests are known too), and
   a forecast. Where one is missing nothing changes.
2. *Carried*: the remaining workers carry (1 + headroom) x every demand between L and L + T, that with the
   backlog too, and the demand of the finished interval (``planner/sizing/look_ahead.py``), with what the
   error budget allows over a whole window (``planner/sizing/error_budget.py``). headroom is half of the mean
   absolute error of the forecast over the forecast, at least 0.05, at most ``scale-down-headroom``
   (``sla_policy.py``).
3. *Minimum*: ``min-endpoint``, or ``min-gpu-budget`` over the GPUs of a worker (``guards.py``).
4. *Patience*: the worker was not needed lately, here:

       kept = min(current, largest size in the last 1 + ceil(L / (2 T)) decisions)

   Sizes count as they are after 1 to 3. A planner without that many decisions keeps all. The look-ahead
   already reaches over the start-up time; this guards against forecasts that were wrong in an interval or
   two. Where the forecast goes on falling clearly (its last interval below 0.9 of its first, and none above
   the one before), that is no accident, and only the newest size counts.
5. *Not late*: no mean latency of the interval is over its target without the model knowing why: there is
   a backlog, or the profile is too good (``late_roles``). A late TTFT keeps both roles, a long ITL keeps
   decode.

**Over the GPU budget** 2 does not hold (``look_ahead.py``): the size is cut to the budget. Workers that 4
and 5 keep stay there too as long as they fit; additions to the other role wait for them. Where even the
kept ones exceed the budget, because it was cut, they leave.

Policy ``both`` removes by thresholds instead, and never below the size that is left after all this
(``decision.py``). With ``sizing: formula`` only 1 and 3 hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

from dynaplan.config.settings.planner import PlannerSettings, SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.model import Observation, PlannerState, Sizing, Step, WorkerLimits
from dynaplan.planner.sizing.limits import fit_budget
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, measured_steady_state

FALLING_RATIO = 0.9
"""Part of the first forecast below which the last one counts as a fall."""


def delay_scale_down(
    settings: PlannerSettings,
    state: PlannerState,
    observation: Observation,
    sizing: Sizing,
    limits: WorkerLimits,
    current: Targets,
    late: Mapping[Role, str],
) -> tuple[PlannerState, Sizing]:
    """Keep workers that were needed lately, or whose role is ``late``; return the next state and the sizing.

    The size of this decision is noted in the state for the next ones.
    """
    intervals = 1 + math.ceil(observation.startup_s / 2 / settings.adjustment_interval_s)
    wanted = (*state.wanted, sizing.targets)[-intervals:]
    state, targets, reasons = replace(state, wanted=wanted), sizing.targets, []
    for role in SCALED_ROLES:
        keep, why = _count_kept(role, intervals, wanted, current, is_falling=_is_falling(observation))
        if role in late:
            keep, why = current.of(role), f"stay: {late[role]}"
        keep = min(keep, limits.most.of(role))
        if targets.of(role) < keep:
            reasons.append(f"{keep} {role.value} workers {why}")
            targets = targets.plus(role, keep - targets.of(role))
    for role in SCALED_ROLES:
        while targets.of(role) > current.of(role) and limits.gpus(targets) > limits.max_gpus:
            targets = targets.plus(role, -1)
    if limits.gpus(targets) > limits.max_gpus:
        targets = fit_budget(targets, replace(limits, least=sizing.targets)) or sizing.targets
    if targets == sizing.targets:
        return state, sizing
    step = Step("steady", sizing.targets, targets, "; ".join(reasons))
    return state, replace(sizing, targets=targets, steps=(*sizing.steps, step), prediction=None)


def _count_kept(
    role: Role, intervals: int, wanted: tuple[Targets, ...], current: Targets, *, is_falling: bool
) -> tuple[int, str]:
    """Return the number of current workers that stay, and why."""
    if len(wanted) < intervals:
        return current.of(role), f"stay until {intervals} intervals have not needed them"
    lately = wanted[-1:] if is_falling else wanted
    keep = min(current.of(role), max(size.of(role) for size in lately))
    return keep, f"were needed within the last {len(wanted)} intervals"


def _is_falling(observation: Observation) -> bool:
    """Tell whether the forecast never rises, and ends below ``FALLING_RATIO`` of its beginning."""
    assert observation.foresight
    forecasts = observation.foresight.expected
    requests = [expected.requests for expected in forecasts if expected.requests is not None]
    falls = all(later <= sooner for sooner, later in pairwise(requests))
    return len(requests) > 1 and falls and requests[-1] < FALLING_RATIO * requests[0]


def late_roles(service: ServiceModel, observation: Observation, targets: SlaTargets) -> dict[Role, str]:
    """Return the roles that may have made requests late, each with the measured mean.

    A role counts when a mean is over its target (in ms) though the uncorrected model expects a mean within
    it for this load on these workers, and also when the model takes them for overloaded. Without a measured
    demand, or with a role without workers, none counts.
    """
    traffic, load = observation.traffic, observation.load
    serving = Targets(load.prefill_workers, load.decode_workers)
    steady = measured_steady_state(service, traffic, serving) if traffic else None
    if traffic is None or steady is None:
        return {}
    expected, late = steady.mean_times(serving), {}
    if _is_late(traffic.itl_ms, targets.itl_ms, expected and expected.mean_itl_ms):
        late[Role.DECODE] = f"the mean ITL was {traffic.itl_ms:.3g} ms"
    if _is_late(traffic.ttft_ms, targets.ttft_ms, expected and expected.mean_ttft_ms):
        late |= dict.fromkeys(SCALED_ROLES, f"the mean TTFT was {traffic.ttft_ms:.0f} ms")
    return late


def _is_late(mean_ms: float | None, target_ms: float, expected_ms: float | None) -> bool:
    """Tell whether a mean is over its target and the model expects it within, or (None) an overload."""
    if not mean_ms or mean_ms <= target_ms:
        return False
    return expected_ms is None or expected_ms <= target_ms
