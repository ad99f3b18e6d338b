"""One pass over the models of a deployment: ``step(deployed, state, seen)`` gives the next state, and orders.

Level-triggered: each pass sees all workers and all memory, the rules plan (``rules/planning``), and the plan
becomes numbers and places of workers (``workers``). Nothing is remembered of a plan: a load that has begun is
a worker that starts, one that leaves is a worker that drains, and both are in the statefile. So a load is
begun once for any number of callers, and whoever begins anew goes on. What ``ModelsState`` remembers is what
no worker shows; only ``learnt`` is in the statefile, and without the others

- ``memory``: what is foreign of a GPU is what nobody is known to hold there, from the next pass on,
- ``sleepers``: a sleeper without an order is taken to wake for a while,
- ``waits``: a demand is as old as the oldest request that waits now,
- ``planner_seen_s``: the planners' process is taken to be there for ``PLANNER_GRACE_S``,
- ``said``, ``events``: sentences are said again,
- ``last``: a sleep that has failed is tried once more, and a preload begins its wait anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from dynaplan.config.settings.models import ServedModel, WorkerPool
from dynaplan.contract.model_keys import MAX_EVENTS, ModelDemand, ModelEvent, ModelOrders
from dynaplan.graph.lifecycle import COUNTS, Role, Worker, WorkerState
from dynaplan.models.deployed import DeployedModels
from dynaplan.models.desired import DesiredModels
from dynaplan.models.model import (
    HOST,
    NOTHING_LEARNT,
    Learnt,
    Load,
    ModelPolicies,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Plan,
)
from dynaplan.models.rules.ladder import failed_sleep
from dynaplan.models.rules.memory import assumed_bytes, level_of
from dynaplan.models.rules.planning import plan
from dynaplan.models.rules.replicas import as_replica, replica_name, wanted_workers
from dynaplan.models.rules.turns import DEMAND_PAUSE_S
from dynaplan.models.shared_memory import HostMemory, SharedGpus, SharedMemory
from dynaplan.models.sleepers import Sleepers
from dynaplan.models.workers import (
    Moment,
    desired_models,
    learn_ready,
    model_status,
    workers_of,
)

USE_KEPT_S = 60.0
"""The precision with which the last use of a model is written down, in seconds."""

MEASURED_MORE = 1.02
"""By how much the memory of a worker has to exceed what was learnt of it to be learnt anew."""

PLANNER_GRACE_S = 60.0
"""What a planner wanted last counts for so long after its process was seen ready; then requests count."""

_SECONDS = re.compile(r"\d[\d.]* s\b")


@dataclass(frozen=True)
class FleetObservation:
    """The fleet, the memory, and what is asked of models, at one moment.

    ``host`` is None where no model is in the host's memory, ``demand`` while that is not known. ``orders``
    are of persons, ``planned_workers`` of planners, by pool. ``asleep`` and ``sleep_orders`` are the values
    of those keys of the store, by instance.
    """

    moment: Moment
    fleet: tuple[Worker, ...]
    gpus: SharedGpus = ()
    host: HostMemory | None = None
    demand: Mapping[str, ModelDemand] | None = field(default_factory=dict)
    orders: ModelOrders = field(default_factory=lambda: ModelOrders({}))
    planned_workers: Mapping[str, int] = field(default_factory=dict)
    asleep: Mapping[int, str] = field(default_factory=dict)
    sleep_orders: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Wait:
    """Since when requests have waited for a model, and when that was last seen."""

    since_s: float
    last_s: float


@dataclass(frozen=True)
class ModelsPass:
    """What a pass saw, and its plan; ``policies`` are those with the pins of persons."""

    moment: Moment = field(default_factory=lambda: Moment(0.0, 0.0))
    fleet: tuple[Worker, ...] = ()
    statuses: Mapping[str, ModelStatus] = field(default_factory=dict)
    policies: ModelPolicies = field(default_factory=lambda: ModelPolicies({}))
    plan: Plan = field(default_factory=Plan)


@dataclass(frozen=True)
class ModelsState:
    """What is remembered between two passes. ``said`` is the last sentence about each model."""

    learnt: Mapping[str, Learnt] = field(default_factory=dict)
    memory: SharedMemory = field(default_factory=SharedMemory)
    sleepers: Sleepers = field(default_factory=Sleepers)
    waits: Mapping[str, Wait] = field(default_factory=dict)
    planner_seen_s: float | None = None
    said: Mapping[str, str] = field(default_factory=dict)
    events: tuple[ModelEvent, ...] = ()
    last: ModelsPass = field(default_factory=ModelsPass)

    def learnt_of(self, pool: str) -> Learnt:
        return self.learnt.get(pool, NOTHING_LEARNT)


def step(
    deployed: DeployedModels, state: ModelsState, seen: FleetObservation
) -> tuple[ModelsState, DesiredModels]:
    """Return the state after a pass, and the workers that models are to have, with places for new ones.

    While the demand is not known nothing is planned: every model stays as it is.
    """
    now_s = seen.moment.now_s
    state = replace(state, sleepers=state.sleepers.follow(seen.asleep, seen.sleep_orders, now_s))
    if seen.demand is None:
        state = replace(state, last=replace(state.last, plan=Plan()))
    else:
        state = _planned(deployed, _followed(deployed, state, seen), seen, seen.demand)
    desired = desired_models(state.last.plan, deployed.components, seen.fleet)
    sleepers = state.sleepers
    for instance_id, level in desired.sleep_orders(seen.fleet):
        sleepers = sleepers.with_sleep_order(instance_id, level)
    for instance_id in desired.wake_orders(seen.fleet):
        sleepers = sleepers.with_wake_order(instance_id)
    return replace(state, sleepers=sleepers), desired


def after_load(
    deployed: DeployedModels, state: ModelsState, worker: Worker, held_bytes: int, load_s: float
) -> ModelsState:
    """Return the state once a worker was seen ready after its load, with the memory that it holds."""
    unix_s = state.last.moment.unix_s
    learnt = {
        pool.name: learn_ready(state.learnt_of(pool.name), held_bytes, load_s, unix_s)
        for pool in deployed.pools
        if pool.component == worker.component
    }
    return replace(state, learnt={**state.learnt, **learnt})


def after_saying(state: ModelsState, unwritable: str = "") -> ModelsState:
    """Return the state after the plan's actions were put into events, but for sentences said before.

    Those that only count seconds down are the same. ``unwritable`` says why the statefile cannot be written,
    so that no load begins; else it is empty.
    """
    said, events = dict(state.said), list(state.events)
    for action in state.last.plan.actions:
        sentence = f"{type(action).__name__.lower()}: {action.why}"
        if unwritable and isinstance(action, Load):
            sentence = f"held up: {unwritable}"
        if _SECONDS.sub("", said.get(action.model, "")) != _SECONDS.sub("", sentence):
            events.append(ModelEvent(state.last.moment.unix_s, action.model, sentence))
        said[action.model] = sentence
    return replace(state, said=said, events=tuple(events[-MAX_EVENTS:]))


def coming_host_bytes(state: ModelsState) -> Iterator[tuple[str, int]]:
    """Yield each model that the plan loads into the host's memory, with the bytes that all up to it need.

    Loads that have begun are counted before all of these.
    """
    last = state.last
    coming_bytes = sum(
        max(0, assumed_bytes(last.policies, status) - status.held_bytes.get(HOST, 0))
        for status in last.statuses.values()
        if status.state is ModelState.LOADING and HOST in status.placed_on
    )
    for each in last.plan.actions:
        if isinstance(each, Load) and HOST in each.devices:
            coming_bytes += each.bytes_each
            yield each.model, coming_bytes


# what is remembered, by what is seen


def _followed(deployed: DeployedModels, state: ModelsState, seen: FleetObservation) -> ModelsState:
    now_s, components = seen.moment.now_s, set(deployed.components.values())
    memory = state.memory.follow(
        (each for each in seen.fleet if each.component in components),
        seen.gpus,
        seen.host,
        now_s,
        kept_bytes=_kept_bytes(deployed, state, seen),
        by_driver=deployed.by_driver,
        budget_bytes=deployed.budget_bytes,
    )
    has_planner = any(each.role is Role.PLANNER and each.state is WorkerState.READY for each in seen.fleet)
    planner_seen_s = now_s if has_planner or state.planner_seen_s is None else state.planner_seen_s
    state = replace(state, memory=memory, planner_seen_s=planner_seen_s)
    learnt = {each.name: _learnt(deployed, state, seen, each) for each in deployed.pools}
    known = {name: each for name, each in learnt.items() if each != NOTHING_LEARNT}
    return replace(state, learnt={**state.learnt, **known})


def _kept_bytes(deployed: DeployedModels, state: ModelsState, seen: FleetObservation) -> dict[str, int]:
    """Return what each sleeping worker keeps on each of its devices, by the worker's name."""
    kept = {}
    for model in deployed.models:
        for worker in workers_of(model.component, seen.fleet):
            progress = state.sleepers.of(worker)
            level = level_of(deployed.policies.models[model.name], progress.level) if progress else None
            if progress and level and progress.state is ModelState.ASLEEP:
                kept[worker.name] = level.kept_bytes
    return kept


def _learnt(deployed: DeployedModels, state: ModelsState, seen: FleetObservation, pool: WorkerPool) -> Learnt:
    """Return what is known of the pool: what was too little for it, what it holds, when it was last used.

    The driver sees all that a worker holds only some time after its load.
    """
    learnt, own = state.learnt_of(pool.name), workers_of(pool.component, seen.fleet)
    failed_bytes = [each.failed_memory_bytes for each in (own if pool.is_prefill else own[:1])]
    learnt = replace(learnt, failed_memory_bytes=max(learnt.failed_memory_bytes, *failed_bytes, 0))
    if pool.component in deployed.by_driver:
        for worker in own:
            if worker.gpus and worker.state is WorkerState.READY:
                held = max(state.memory.held(worker, pool.component).values(), default=0)
                if held > learnt.memory_bytes * MEASURED_MORE:
                    learnt = replace(learnt, memory_bytes=held)
    demand = None if pool.is_prefill else (seen.demand or {}).get(pool.name)
    if demand and demand.last_use_unix_s > learnt.last_use_unix_s + USE_KEPT_S:
        learnt = replace(learnt, last_use_unix_s=demand.last_use_unix_s)
    return learnt


# what the rules see, and what they plan


def _planned(
    deployed: DeployedModels, state: ModelsState, seen: FleetObservation, demand: Mapping[str, ModelDemand]
) -> ModelsState:
    """Return the state with the plan for what is seen."""
    now_s = seen.moment.now_s
    statuses = {each.name: _first_worker(deployed, state, seen, each, demand) for each in deployed.models}
    waits = {name: _wait(state.waits.get(name), each, now_s) for name, each in statuses.items()}
    state = replace(state, waits={name: each for name, each in waits.items() if each})
    learnt = dict(state.learnt)
    for name, status in statuses.items():
        if status.load_asked_s is not None and status.state is ModelState.READY:  # it was there already
            learnt[name] = replace(state.learnt_of(name), ready_unix_s=round(seen.moment.unix_s, 2))
            status = replace(status, load_asked_s=None)
        wait = waits[name]
        statuses[name] = replace(status, waiting_since_s=wait.since_s if wait else inf)
    policies = _with_pins(deployed.policies, seen.orders)
    for model in deployed.models:
        first = statuses[model.name] = _as_planned(deployed, state, seen, model, statuses[model.name])
        for pool in model.pools:
            statuses |= _further_workers(deployed, state, seen, pool, first)
    observation = ModelsObservation(tuple(statuses.values()), state.memory.devices)
    last = ModelsPass(seen.moment, seen.fleet, statuses, policies, plan(observation, policies, now_s))
    return replace(state, learnt=learnt, last=last)


def _with_pins(policies: ModelPolicies, orders: ModelOrders) -> ModelPolicies:
    """Return the policies with what persons have pinned and unpinned."""
    wishes = {name: orders.of(name).is_pinned for name in policies.models}
    pinned = {
        name: each if wishes[name] is None else replace(each, is_pinned=bool(wishes[name]))
        for name, each in policies.models.items()
    }
    return replace(policies, models=pinned)


def _first_worker(
    deployed: DeployedModels,
    state: ModelsState,
    seen: FleetObservation,
    model: ServedModel,
    demand: Mapping[str, ModelDemand],
) -> ModelStatus:
    """Return the status of the model: that of the worker that stays longest, or of none."""
    name, now_s = model.name, seen.moment.now_s
    worker = next(iter(workers_of(model.component, seen.fleet)), None)
    learnt, before = state.learnt_of(name), state.last.statuses.get(name, ModelStatus(name))
    order, progress = seen.orders.of(name), state.sleepers.of(worker)
    status = model_status(name, worker, demand.get(name), order, learnt, seen.moment, progress)
    status = replace(status, held_bytes=state.memory.held(worker, model.component))
    failed = status.sleep_failure or failed_sleep(deployed.policies.models[name], status, now_s)
    if failed or before.has_failed_to_sleep:
        status = replace(status, has_failed_to_sleep=True)
    if model.settings.preload and not learnt.ready_unix_s and status.load_asked_s is None:
        status = replace(status, load_asked_s=now_s if before.load_asked_s is None else before.load_asked_s)
    if status.held_bytes and worker is None:  # it has gone, and its memory is not back
        return replace(status, state=ModelState.DRAINING, placed_on=tuple(status.held_bytes))
    return status


def _wait(before: Wait | None, status: ModelStatus, now_s: float) -> Wait | None:
    """Return the wait for a model that is not ready; None where nobody has waited lately."""
    if status.state is ModelState.READY or (before and now_s - before.last_s > DEMAND_PAUSE_S):
        before = None
    if not status.waiting or status.state is ModelState.READY:
        return before
    return Wait(min(status.oldest_arrival_s, before.since_s if before else inf), now_s)


def _as_planned(
    deployed: DeployedModels,
    state: ModelsState,
    seen: FleetObservation,
    model: ServedModel,
    status: ModelStatus,
) -> ModelStatus:
    """Return the status with the numbers of workers that the model's planner wants.

    Until it has asked for some, those that the model has. Without a planner, or when that has been away for
    too long, nothing changes: requests count.
    """
    seen_s = state.planner_seen_s
    if model.name not in deployed.planned or seen_s is None or seen.moment.now_s - seen_s > PLANNER_GRACE_S:
        return status

    def wanted(pool: WorkerPool) -> int:
        own = [each for each in seen.fleet if each.component == pool.component]
        present = sum(each.state in COUNTS and each.state is not WorkerState.FAILED for each in own)
        return seen.planned_workers.get(pool.name, max(1, present))

    decode, *prefill = map(wanted, model.pools)
    return replace(status, planned_workers=decode, planned_prefill_workers=prefill[0] if prefill else None)


def _further_workers(
    deployed: DeployedModels,
    state: ModelsState,
    seen: FleetObservation,
    pool: WorkerPool,
    first: ModelStatus,
) -> dict[str, ModelStatus]:
    """Return the status of the pool's workers but the model's first, by name.

    One more stands for memory that workers which have gone have not given back.
    """
    found: dict[str, ModelStatus] = {}
    planned = first.planned_prefill_workers if pool.is_prefill else first.planned_workers
    wanted = wanted_workers(deployed.policy(pool), first.in_flight + first.waiting, planned)
    begin, order, learnt = 1 if pool.is_prefill else 2, seen.orders.of(pool.model), state.learnt_of(pool.name)
    for number, worker in enumerate(workers_of(pool.component, seen.fleet)[begin - 1 :], begin):
        name, is_wanted = replica_name(pool.name, number), number <= wanted
        status = model_status(name, worker, None, order, learnt, seen.moment)
        last_use_s = state.last.statuses[name].last_use_s if name in state.last.statuses else status.since_s
        status = replace(
            status,
            last_use_s=seen.moment.now_s if is_wanted else last_use_s,
            held_bytes=state.memory.held(worker, pool.component),
        )
        found[name] = as_replica(status, name, first, is_wanted, pool.is_prefill)
    left = state.memory.held(None, pool.component)
    if left and (pool.is_prefill or first.state is not ModelState.DRAINING):
        name = f"{pool.name} (gone)"
        gone = ModelStatus(name, ModelState.DRAINING, replica_of=pool.model, is_prefill=pool.is_prefill)
        found[name] = replace(gone, held_bytes=left, placed_on=tuple(left))
    return found
