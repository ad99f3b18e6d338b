"""From the fleet that is to the fleet that is wanted: which worker to remove, drain, restart or start next.

Level-triggered: it looks at the whole fleet each time, never at what happened before, so it may be
called at any moment, any number of times, and after any crash. Doing what it says and asking again
gives nothing new.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dynaplan.core.fleet.allocation import choose_gpus
from dynaplan.domain.actions import Action, Drain, Remove, Restart, Start, Waiting
from dynaplan.domain.gpus import Gpu
from dynaplan.domain.graph import GraphSpec, ServiceSpec
from dynaplan.domain.lifecycle import COUNTS, HOLDS_GPUS, Worker, WorkerState, worker_name

_FIRST_TO_LEAVE = {
    WorkerState.FAILED: 0,
    WorkerState.BACKOFF: 1,
    WorkerState.STARTING: 2,
    WorkerState.READY: 3,
}
"""Who leaves first when there are too many: those that serve nobody, then the highest index."""

_WITHOUT_PROCESS = frozenset({WorkerState.FAILED, WorkerState.BACKOFF, WorkerState.STOPPED})


def reconcile(
    graph: GraphSpec,
    fleet: tuple[Worker, ...],
    desired: Mapping[str, int],
    inventory: Sequence[Gpu],
    unusable: frozenset[int],
    now_s: float,
    retry_failed: bool = False,
) -> tuple[Action, ...]:
    """The steps to the desired fleet, in the order to take them: removals, drains, restarts, starts.

    ``desired`` is component -> number of workers; a component that it lacks, or has below 0 ("not
    set"), gets the number in the graph; a component that the graph lacks gets none. ``unusable`` are
    GPUs that somebody else holds. A failed worker counts as one of the desired ones, so that what
    cannot run is not started for ever; ``retry_failed``, given when the desired counts are written
    anew, replaces failed workers. ``Waiting`` stands for a worker whose GPUs are not free yet.
    """
    own_process = [service for service in graph.services if not service.in_process_of]
    wanted = {service.name: _wanted(service, desired) for service in own_process}
    leaving = _leaving(fleet, wanted, now_s, retry_failed)
    after = applied(fleet, leaving)
    due = [worker for worker in after if worker.state is WorkerState.BACKOFF and worker.retry_at_s <= now_s]
    restarts = tuple(Restart(worker.moved(WorkerState.STARTING, now_s)) for worker in due)
    starts = _starts(graph, applied(after, restarts), wanted, inventory, unusable, now_s)
    return (*leaving, *restarts, *starts)


def applied(fleet: tuple[Worker, ...], actions: Iterable[Action]) -> tuple[Worker, ...]:
    """The fleet once these actions have begun: what to write down before carrying them out."""
    workers = {worker.name: worker for worker in fleet}
    for action in actions:
        if isinstance(action, Remove):
            workers.pop(action.worker.name, None)
        elif not isinstance(action, Waiting):
            workers[action.worker.name] = action.worker
    return tuple(workers.values())


def _wanted(service: ServiceSpec, desired: Mapping[str, int]) -> int:
    number = desired.get(service.name, -1)
    return service.workers if number < 0 else number


def _leaving(
    fleet: tuple[Worker, ...], wanted: Mapping[str, int], now_s: float, retry_failed: bool
) -> tuple[Remove | Drain, ...]:
    """Removals, then drains: what is gone, what failed and is to be tried again, and what is too many."""
    going = [(worker, "its process is gone") for worker in fleet if worker.state is WorkerState.STOPPED]
    if retry_failed:
        going += [(worker, "failed, tried again") for worker in fleet if worker.state is WorkerState.FAILED]
    names = {worker.name for worker, _ in going}
    staying = [worker for worker in fleet if worker.state in COUNTS and worker.name not in names]
    for component in dict.fromkeys(worker.component for worker in staying):
        mine = [worker for worker in staying if worker.component == component]
        mine.sort(key=lambda worker: (_FIRST_TO_LEAVE[worker.state], -worker.index))
        number = wanted.get(component, 0)
        why = f"{number} of {len(mine)} {component} wanted"
        going += [(worker, why) for worker in mine[: max(0, len(mine) - number)]]
    removals = [(worker, why) for worker, why in going if worker.state in _WITHOUT_PROCESS]
    drains = [(worker, why) for worker, why in going if worker.state not in _WITHOUT_PROCESS]
    return (
        *(Remove(_gone(worker, now_s, why), why) for worker, why in removals),
        *(Drain(worker.moved(WorkerState.DRAINING, now_s, why), why) for worker, why in drains),
    )


def _gone(worker: Worker, now_s: float, why: str) -> Worker:
    return worker if worker.state is WorkerState.STOPPED else worker.moved(WorkerState.STOPPED, now_s, why)


def _starts(
    graph: GraphSpec,
    fleet: tuple[Worker, ...],
    wanted: Mapping[str, int],
    inventory: Sequence[Gpu],
    unusable: frozenset[int],
    now_s: float,
) -> tuple[Start | Waiting, ...]:
    """A start for every worker that is missing and finds its GPUs; one Waiting per component for the rest."""
    actions: list[Start | Waiting] = []
    for service in graph.services:
        existing = sum(worker.component == service.name and worker.state in COUNTS for worker in fleet)
        for _ in range(wanted.get(service.name, 0) - existing):
            choice = choose_gpus(inventory, fleet, unusable, service.gpus)
            if choice is None:
                actions.append(Waiting(service.name, _why_waiting(service, fleet, inventory, unusable)))
                break
            name = _free_name(graph, service.name, fleet)
            gpus, share = choice
            worker = Worker(name, service.name, service.role, gpus=gpus, gpu_share=share, since_s=now_s)
            fleet = (*fleet, worker)
            actions.append(Start(worker))
    return tuple(actions)


def _free_name(graph: GraphSpec, component: str, fleet: tuple[Worker, ...]) -> str:
    """The name of the component's lowest free index.

    circus finds watchers whatever the case of their names, and worker 1 of ``Worker`` has the name of
    the base worker of a service ``Worker_1``: neither may meet.
    """
    others = [service.name for service in graph.services if service.name != component]
    taken = {worker.name.lower() for worker in fleet}
    taken |= {worker_name(graph.namespace, other, 0).lower() for other in others}
    index = 0
    while worker_name(graph.namespace, component, index).lower() in taken:
        index += 1
    return worker_name(graph.namespace, component, index)


def _why_waiting(
    service: ServiceSpec, fleet: tuple[Worker, ...], inventory: Sequence[Gpu], unusable: frozenset[int]
) -> str:
    held = {index for worker in fleet if worker.state in HOLDS_GPUS for index in worker.gpus}
    free = [gpu for gpu in inventory if gpu.index not in held | unusable]
    why = f"it needs {service.gpus:g} GPU, {len(free)} of {len(inventory)} are free"
    if foreign := sorted({gpu.index for gpu in inventory} & unusable):
        why += f"; held by others: {','.join(map(str, foreign))}"
    draining = [worker.name for worker in fleet if worker.state is WorkerState.DRAINING and worker.gpus]
    return why + (f"; draining: {', '.join(draining)}" if draining else "")
