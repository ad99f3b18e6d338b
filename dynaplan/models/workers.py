"""Models that are loaded on request, as the fleet has them: from workers to models, and back.

A model's state is that of its worker, so nothing about it has to be remembered that the statefile does not
have of the worker already:

==========================  =============
its worker                  the model
==========================  =============
none, stopped               unloaded
starting, backoff           loading
ready                       ready, asleep; draining, when it is to sleep; loading, while it wakes
draining                    draining
failed                      failed
==========================  =============

``dynaplan.models`` decides what is loaded, and ``desired_models`` turns that into numbers of workers and
places for them, which are reconciled like all others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dynaplan.contract.model_keys import NO_DEMAND, ModelDemand, ModelOrder
from dynaplan.graph.lifecycle import COUNTS, Worker, WorkerState
from dynaplan.models.desired import DesiredModels
from dynaplan.models.model import (
    HOST,
    Learnt,
    Load,
    ModelState,
    ModelStatus,
    Plan,
    Refuse,
    Sleep,
    Unload,
    Wake,
)
from dynaplan.models.rules.replicas import replica_name
from dynaplan.models.sleepers import SleepProgress

_STATES: Mapping[WorkerState, ModelState] = {
    WorkerState.STARTING: ModelState.LOADING,
    WorkerState.BACKOFF: ModelState.LOADING,
    WorkerState.READY: ModelState.READY,
    WorkerState.DRAINING: ModelState.DRAINING,
    WorkerState.FAILED: ModelState.FAILED,
    WorkerState.STOPPED: ModelState.UNLOADED,
}


@dataclass(frozen=True)
class Moment:
    """Now, on the clock of the workers and by the wall clock, in seconds."""

    now_s: float
    unix_s: float

    def mono_s(self, unix_s: float) -> float:
        """Return the moment of the wall clock on the clock of the workers."""
        return self.now_s - (self.unix_s - unix_s)

    def to_unix_s(self, mono_s: float) -> float:
        return mono_s if math.isinf(mono_s) else self.unix_s - (self.now_s - mono_s)


_ORDER = (
    WorkerState.READY,
    WorkerState.STARTING,
    WorkerState.BACKOFF,
    WorkerState.FAILED,
    WorkerState.DRAINING,
)
"""Of a model's workers the first in this order decides its state; the others are further ones."""


def workers_of(component: str, fleet: Iterable[Worker]) -> list[Worker]:
    """Return the component's workers that are there, the one that decides the model's state first."""
    own = [each for each in fleet if each.component == component and each.state in _ORDER]
    return sorted(own, key=lambda each: (_ORDER.index(each.state), each.index))


def model_status(
    name: str,
    worker: Worker | None,
    demand: ModelDemand | None,
    order: ModelOrder,
    learnt: Learnt,
    moment: Moment,
    progress: SleepProgress | None = None,
) -> ModelStatus:
    """Return the status of the model, by that worker of it (None: it has none)."""
    demand = demand or NO_DEMAND
    state = _STATES[worker.state] if worker else ModelState.UNLOADED
    since_s = worker.since_s if worker else 0.0
    if progress and state is ModelState.READY:
        state, since_s = progress.state, max(since_s, progress.since_s)
    used_unix_s = max(demand.last_use_unix_s, learnt.last_use_unix_s)
    last_use_s = max(
        moment.mono_s(used_unix_s) if used_unix_s else 0.0, since_s if state is ModelState.READY else 0.0
    )
    return ModelStatus(
        name=name,
        state=state,
        since_s=since_s,
        last_use_s=last_use_s,
        in_flight=demand.in_flight,
        waiting=demand.waiting,
        oldest_arrival_s=moment.mono_s(demand.oldest_unix_s) if demand.waiting else math.inf,
        load_asked_s=_load_asked_s(order, learnt, moment),
        unload_asked=_is_unload_asked(order, worker, moment),
        keep_alive_s=demand.keep_alive_s,
        keep_until_s=moment.mono_s(order.keep_until_unix_s) if order.keep_until_unix_s else 0.0,
        placed_on=_devices(worker),
        learnt=learnt,
        sleep_level=progress.level if progress else "",
        sleep_failure=progress.failure if progress else "",
        retry_at_s=_retry_at_s(worker),
        reason=worker.reason.partition("\n")[0] if worker else "",
        last_lines=worker.last_lines if worker else "",
    )


def _devices(worker: Worker | None) -> tuple[int, ...]:
    if worker is None or worker.state in (WorkerState.FAILED, WorkerState.STOPPED):
        return ()
    return worker.gpus or (HOST,)


def _retry_at_s(worker: Worker | None) -> float:
    """Return when a failed worker may be tried again: infinity for never, 0 if it has not failed."""
    if worker is None or worker.state is not WorkerState.FAILED:
        return 0.0
    return worker.retry_at_s or math.inf


def _load_asked_s(order: ModelOrder, learnt: Learnt, moment: Moment) -> float | None:
    """Return when a person asked to load the model.

    None when it was loaded since, or the order taken back.
    """
    is_over = order.load_unix_s <= max(order.unload_unix_s, learnt.ready_unix_s)
    return None if is_over else moment.mono_s(order.load_unix_s)


def _is_unload_asked(order: ModelOrder, worker: Worker | None, moment: Moment) -> bool:
    """Tell whether a person asked to unload this worker: after it came, and not to load the model since."""
    if worker is None or order.unload_unix_s <= order.load_unix_s:
        return False
    return worker.since_s <= moment.mono_s(order.unload_unix_s)


def desired_models(plan: Plan, components: Mapping[str, str], fleet: Sequence[Worker]) -> DesiredModels:
    """Return the workers that carry out the plan; where it has no action, a model keeps its number."""
    workers: dict[str, int] = {}
    placements: dict[str, Load] = {}
    leaving: dict[str, str] = {}
    to_sleep: dict[str, str] = {}
    to_wake: set[str] = set()
    actions = {each.model: each for each in plan.actions if not isinstance(each, Refuse)}
    for model, component in components.items():
        own = workers_of(component, fleet)
        workers[component] = sum(each.state in COUNTS for each in own)
        for number in range(1, len(own) + 2):
            action = actions.get(replica_name(model, number))
            worker = own[number - 1] if number <= len(own) else None
            if isinstance(action, Load):
                workers[component] += worker is None or worker.state not in COUNTS
                placements[component] = action
            elif worker is None or worker.state not in COUNTS:
                continue
            elif isinstance(action, Unload):
                workers[component] -= 1
                leaving[worker.name] = action.why
            elif isinstance(action, Sleep):
                to_sleep[worker.name] = action.level
            elif isinstance(action, Wake):
                to_wake.add(worker.name)
    return DesiredModels(workers, placements, leaving, to_sleep, frozenset(to_wake))


def learn_ready(learnt: Learnt, held_bytes: int, load_s: float, unix_s: float) -> Learnt:
    """Return what is known once a worker was seen ready after its load; 0 ``held_bytes``: not measured."""
    memory_bytes = held_bytes or learnt.memory_bytes
    return replace(learnt, memory_bytes=memory_bytes, load_s=round(load_s, 2), ready_unix_s=round(unix_s, 2))
