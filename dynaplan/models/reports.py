"""What is published of each model: the view of the last pass for frontends, persons and planners."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from dynaplan.config.settings.models import ServedModel, WorkerPool
from dynaplan.contract.model_keys import ModelReport, PoolReport, Refusal
from dynaplan.models.deployed import DeployedModels
from dynaplan.models.model import HOST, Load, ModelPolicy, ModelState, ModelStatus, Refuse
from dynaplan.models.rules.ladder import idle_until_s
from dynaplan.models.rules.memory import assumed_bytes
from dynaplan.models.step import ModelsPass, ModelsState

UNWRITABLE_PATIENCE_S = 10.0
"""For how long a request waits for a load that cannot begin, as the statefile cannot be written."""

UNWRITABLE_RETRY_S = 30.0
"""The ``Retry-After`` of those that are refused then."""


def reports(deployed: DeployedModels, state: ModelsState, unwritable: str = "") -> dict[str, ModelReport]:
    """Return what is published of each model, by name.

    ``unwritable`` says why the statefile cannot be written, so that no load begins; else it is empty.
    Requests that have waited for such a load for some time are then refused.
    """
    last = state.last
    workers = defaultdict[str, list[ModelStatus]](list)
    for each in last.statuses.values():
        workers[each.replica_of or each.name].append(each)
    known = (each for each in deployed.models if each.name in last.statuses)
    found = {each.name: _report(state, each, workers[each.name]) for each in known}
    came_until_s = last.moment.to_unix_s(last.moment.now_s - UNWRITABLE_PATIENCE_S)
    refusal = Refusal(503, unwritable, came_until_s, UNWRITABLE_RETRY_S)
    for action in last.plan.actions:
        if unwritable and isinstance(action, Load) and action.model in found:
            found[action.model] = replace(found[action.model], why=unwritable, refusal=refusal)
    return found


def _report(state: ModelsState, model: ServedModel, workers: Iterable[ModelStatus]) -> ModelReport:
    last = state.last
    status, policy, moment = last.statuses[model.name], last.policies.models[model.name], last.moment
    is_unloaded = status.state is ModelState.UNLOADED
    until_s = idle_until_s(policy, status)
    return ModelReport(
        component=model.component,
        state=status.state.value,
        since_unix_s=0.0 if is_unloaded else round(moment.to_unix_s(status.since_s), 1),
        load_s=round(status.learnt.load_s or policy.estimate_load_s, 1),
        why=_why(state, status),
        is_pinned=policy.is_pinned,
        memory_bytes=_shown_bytes(last, status),
        gpus=tuple(sorted({index for each in workers for index in each.placed_on if index != HOST})),
        max_workers=policy.max_workers,
        leaves_unix_s=0.0 if math.isinf(until_s) else round(moment.to_unix_s(until_s), 1),
        workers=_count_workers(last, model.component),
        gpus_each=policy.devices,
        planned_workers=status.planned_workers,
        prefill=_prefill_report(state, model.prefill, policy.prefill)
        if model.prefill and policy.prefill
        else None,
        last_lines=status.last_lines,
        refusal=_refusal(last, model.name),
    )


def _prefill_report(state: ModelsState, pool: WorkerPool, policy: ModelPolicy) -> PoolReport:
    learnt = state.learnt_of(pool.name)
    return PoolReport(
        workers=_count_workers(state.last, pool.component),
        max_workers=policy.max_workers,
        gpus_each=policy.devices,
        load_s=round(learnt.load_s or policy.estimate_load_s, 1),
        memory_bytes=policy.claim_bytes or learnt.memory_bytes or policy.estimate_bytes,
        planned_workers=state.last.statuses[pool.model].planned_prefill_workers,
    )


def _refusal(last: ModelsPass, model: str) -> Refusal | None:
    for each in last.plan.actions:
        if isinstance(each, Refuse) and each.model == model:
            until_unix_s = last.moment.to_unix_s(min(each.arrived_until_s, last.moment.now_s))
            return Refusal(each.status, each.why, until_unix_s, each.retry_after_s)
    return None


def _count_workers(last: ModelsPass, component: str) -> dict[str, int]:
    """Return the numbers of the component's workers by state."""
    return dict(Counter(each.state.value for each in last.fleet if each.component == component))


def _why(state: ModelsState, status: ModelStatus) -> str:
    """Return the last sentence about the model: what it waits for, while requests wait for it."""
    steps = (
        [step.why for step in state.last.plan.trail if step.model == status.name] if status.waiting else []
    )
    return steps[-1] if steps else state.said.get(status.name, "") or status.reason


def _shown_bytes(last: ModelsPass, status: ModelStatus) -> int:
    """Return the memory to show of a model: what it holds, or until it is loaded what it is taken to need."""
    held_bytes = max(status.held_bytes.values(), default=0)
    if status.state is ModelState.LOADING or not held_bytes:
        return max(held_bytes, assumed_bytes(last.policies, status))
    return held_bytes
