"""Reconciling: from the fleet that is to the fleet that is wanted.

Level-triggered: it reads the whole fleet each time, never what happened before, so it may be called at
any moment, any number of times, and after any crash. Reconciling its own result changes nothing.

The result is written down before anything is done about it. After a crash in between, the states of the
workers say what was meant: a STARTING worker without a process needs one, a DRAINING worker with a process
must leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from dynaplan.contract.gpus import Gpu, by_reason
from dynaplan.fleet.rules.allocation import choose_gpus
from dynaplan.graph.lifecycle import (
    COUNTS,
    HOLDS_GPUS,
    LIFECYCLE,
    Role,
    Worker,
    WorkerEvent,
    WorkerState,
    worker_name,
)
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.models.desired import NO_MODELS, DesiredModels
from dynaplan.util.documents import number_field, text_field

Fleet = tuple[Worker, ...]

FIRST_TO_LEAVE = {
    WorkerState.FAILED: 0,
    WorkerState.BACKOFF: 1,
    WorkerState.STARTING: 2,
    WorkerState.READY: 3,
}
"""The order in which surplus workers leave: workers without requests first, then the highest index."""

NOTHING_RESERVED: Mapping[int, str] = MappingProxyType({})
"""The reserved GPUs where nobody has reserved any."""

OPERATOR_RESTART = "told to by circusctl restart"
"""The reason of a worker that is replaced on a person's word."""

_WITHOUT_PROCESS = frozenset({WorkerState.FAILED, WorkerState.BACKOFF, WorkerState.STOPPED})


@dataclass(frozen=True)
class Reconciled:
    """The fleet after one step of reconciling.

    ``removed`` are the workers to forget, with their watchers: name -> reason. They have no process, and
    their names and GPUs may belong to new workers in ``fleet`` already. ``waiting`` are the components that
    lack a worker for which there are no free GPUs: component -> reason.
    """

    fleet: Fleet
    removed: Mapping[str, str]
    waiting: Mapping[str, str]

    def started(self, before: Iterable[Worker]) -> Fleet:
        """The workers that the fleet before had not; one with the name of a removed worker is new."""
        kept = {worker.name for worker in before} - self.removed.keys()
        return tuple(worker for worker in self.fleet if worker.name not in kept)

    def steps(self, before: Iterable[Worker]) -> Iterator[tuple[str, Worker]]:
        """The changes since the fleet before, in words for the log: remove, drain, restart, start."""
        old = {worker.name: worker for worker in before}
        yield from (("remove", old.pop(name)) for name in self.removed)
        for worker in self.fleet:
            if worker.name not in old:
                yield "start", worker
            elif worker.state is not old[worker.name].state:
                yield "drain" if worker.state is WorkerState.DRAINING else "restart", worker


def reconcile(
    graph: GraphSpec,
    fleet: Fleet,
    desired: Mapping[str, int],
    inventory: Sequence[Gpu],
    unusable: Mapping[int, str],
    now_s: float,
    retry_failed: bool = False,
    leave_first: str = "",
    reserved: Mapping[int, str] = NOTHING_RESERVED,
    renewed: Collection[str] = (),
    models: DesiredModels = NO_MODELS,
) -> Reconciled:
    """Return the fleet in which every removal, drain, restart and start that is due has begun.

    ``desired`` is component -> number of workers. A component that it lacks, or has below 0 ("not set"), gets
    the number in the graph; a component that the graph lacks gets none. ``unusable`` are the GPUs that
    somebody else has: index -> a description of the holder. A failed worker counts as one of the desired
    ones, so that a worker that cannot run is not started all the time; it is replaced when its ``retry_at_s``
    has come, or, by ``retry_failed``, when the desired counts are written anew. Before any
    other the one named ``leave_first`` leaves. Workers on a GPU that is ``reserved``, index -> the
    reason, and the workers named in ``renewed``, leave once others are ready in their places. A service of
    ``models`` has the number that they say, and a worker of it starts where they place it.
    """
    desired = {**desired, **models.workers}
    own_process = [service for service in graph.services if not service.in_process_of]
    wanted = {service.name: _wanted(service, desired) for service in own_process}
    vacating = _vacating(fleet, reserved) | dict.fromkeys(renewed, OPERATOR_RESTART)
    due = _due_for_retry(fleet, models, now_s, retry_failed)
    leaving = _leaving(fleet, wanted, due, leave_first, vacating, models.leaving)
    leaving |= {each.name: (each, vacating[each.name]) for each in fleet if _leaves_at_once(each, vacating)}
    removed = {worker.name: why for worker, why in leaving.values() if worker.state in _WITHOUT_PROCESS}
    staying = tuple(_next(worker, leaving, now_s) for worker in fleet if worker.name not in removed)
    failures = {} if retry_failed else _failures(worker for worker in fleet if worker.name in removed)
    # After the removals: their names and GPUs are free for those that start.
    started, waiting = _starts(graph, staying, wanted, inventory, unusable, now_s, vacating, models)
    # After the starts: a ready worker stays on its reserved GPU while another of its service starts.
    staying = _vacated(staying, started, vacating, now_s)
    started = tuple(replace(worker, failures=failures.get(worker.component, 0)) for worker in started)
    return Reconciled((*staying, *started), removed, waiting)


def replaced(fleet: Fleet, names: Collection[str], now_s: float) -> Fleet:
    """Return the fleet in which these workers leave, after their requests, so that others take their places.

    A failed one is tried again; one that is leaving, or is about to be started again, is as it was.
    """
    event = WorkerEvent.TOLD_TO_LEAVE
    return tuple(
        worker.after(event, now_s, OPERATOR_RESTART)
        if worker.name in names and event in LIFECYCLE[worker.state]
        else worker
        for worker in fleet
    )


def renewable(fleet: Fleet, names: Collection[str]) -> tuple[set[str], set[str]]:
    """Return which of these workers leave at once, and which once others are ready in their places.

    The second are ready ones without GPUs, frontends above all: nobody waits for a GPU of theirs, and the
    socket that they accept connections from is shared. A planner leaves at once: two would decide. Where a
    worker of the same component has crashed, as the new one may have, a ready one stays and is in neither.
    """
    told = [each for each in fleet if each.name in names]
    beside = {
        each.name
        for each in told
        if each.state is WorkerState.READY and not each.gpus and each.role is not Role.PLANNER
    }
    crashed = {each.component for each in fleet if each.state in (WorkerState.BACKOFF, WorkerState.FAILED)}
    return (
        {each.name for each in told} - beside,
        {each.name for each in told if each.name in beside and each.component not in crashed},
    )


def _vacating(fleet: Fleet, reserved: Mapping[int, str]) -> dict[str, str]:
    """The workers that are to leave reserved GPUs: name -> the reason."""
    return {
        each.name: f"GPU {index} is {reserved[index]}"
        for each in fleet
        for index in each.gpus
        if index in reserved and each.state in COUNTS & HOLDS_GPUS
    }


def _leaves_at_once(worker: Worker, vacating: Mapping[str, str]) -> bool:
    """Tell whether a worker, as it is not ready, leaves its reserved GPU before another is in its place."""
    return worker.name in vacating and worker.state is not WorkerState.READY


def _vacated(fleet: Fleet, started: Fleet, vacating: Mapping[str, str], now_s: float) -> Fleet:
    """Return the fleet with ready workers on reserved GPUs draining, but not while their substitutes start.

    ``vacating`` is name of worker -> why.
    """
    others = [each for each in (*fleet, *started) if each.name not in vacating]
    coming = {each.component for each in others if each.state is WorkerState.STARTING}
    return tuple(
        each.after(WorkerEvent.TOLD_TO_LEAVE, now_s, vacating[each.name])
        if each.name in vacating and each.state is WorkerState.READY and each.component not in coming
        else each
        for each in fleet
    )


def _wanted(service: ServiceSpec, desired: Mapping[str, int]) -> int:
    number = desired.get(service.name, -1)
    return service.first_workers if number < 0 else number


def _failures(replaced: Iterable[Worker]) -> dict[str, int]:
    """The most failures in a row of the replaced workers of each component."""
    return {worker.component: worker.failures for worker in sorted(replaced, key=lambda w: w.failures)}


def _leaving(
    fleet: Fleet,
    wanted: Mapping[str, int],
    due: Iterable[Worker],
    leave_first: str,
    vacating: Collection[str],
    chosen: Mapping[str, str],
) -> dict[str, tuple[Worker, str]]:
    """The workers that are gone, that failed and are tried again, or are too many; each with the reason."""
    leaving = {
        worker.name: (worker, "its process is gone")
        for worker in fleet
        if worker.state is WorkerState.STOPPED
    }
    leaving |= {worker.name: (worker, "failed, tried again") for worker in due}
    leaving |= {
        worker.name: (worker, chosen[worker.name])
        for worker in fleet
        if worker.name in chosen and worker.state in COUNTS
    }
    gone = leaving.keys() | set(vacating)
    counted = [worker for worker in fleet if worker.state in COUNTS and worker.name not in gone]
    for component in dict.fromkeys(worker.component for worker in counted):
        workers = [worker for worker in counted if worker.component == component]
        workers.sort(
            key=lambda worker: (
                worker.name != leave_first,
                FIRST_TO_LEAVE[worker.state],
                -worker.index,
            )
        )
        number = wanted.get(component, 0)
        surplus = workers[: max(0, len(workers) - number)]
        why = f"{number} of {len(workers)} {component} wanted"
        leaving |= {worker.name: (worker, why) for worker in surplus}
    return leaving


def _due_for_retry(fleet: Fleet, models: DesiredModels, now_s: float, retry_failed: bool) -> list[Worker]:
    """The failed workers that are tried again, by ``retry_failed`` or when their time has come.

    One of a model that is loaded on request: when it is placed.
    """
    failed = [worker for worker in fleet if worker.state is WorkerState.FAILED]
    return [
        worker
        for worker in failed
        if (
            worker.component in models.placements
            if worker.component in models.workers
            else retry_failed or 0 < worker.retry_at_s <= now_s
        )
    ]


def _next(worker: Worker, leaving: Mapping[str, tuple[Worker, str]], now_s: float) -> Worker:
    """Return the worker: told to leave if it is in ``leaving``, starting if its restart is due."""
    if worker.name in leaving:
        return worker.after(WorkerEvent.TOLD_TO_LEAVE, now_s, leaving[worker.name][1])
    if worker.state is WorkerState.BACKOFF and worker.retry_at_s <= now_s:
        return worker.after(WorkerEvent.DELAY_OVER, now_s)
    return worker


def _starts(
    graph: GraphSpec,
    fleet: Fleet,
    wanted: Mapping[str, int],
    inventory: Sequence[Gpu],
    unusable: Mapping[int, str],
    now_s: float,
    vacating: Collection[str],
    models: DesiredModels,
) -> tuple[Fleet, dict[str, str]]:
    """A new worker for each missing one for which GPUs are free, and the components that wait for GPUs."""
    started: Fleet = ()
    waiting: dict[str, str] = {}
    for service in graph.services:
        if service.model:
            started += _placed(graph, service, fleet, models, now_s)
            continue
        own = [worker for worker in fleet if worker.component == service.name and worker.name not in vacating]
        existing = sum(worker.state in COUNTS for worker in own)
        for _ in range(wanted.get(service.name, 0) - existing):
            choice = choose_gpus(inventory, (*fleet, *started), unusable, service.gpus)
            if choice is None:
                waiting[service.name] = _why_waiting(service, (*fleet, *started), inventory, unusable)
                break
            name = _free_name(graph, service.name, (*fleet, *started))
            gpus, share = choice
            worker = Worker(name, service.name, service.role, gpus=gpus, gpu_share=share, since_s=now_s)
            started = (*started, worker)
    return started, waiting


def _placed(
    graph: GraphSpec, service: ServiceSpec, fleet: Fleet, models: DesiredModels, now_s: float
) -> Fleet:
    """Return a new worker of a model that is loaded on request, or none.

    There is one when the model has fewer workers than are wanted, and has been given a place.
    """
    place = models.placements.get(service.name)
    existing = sum(each.component == service.name and each.state in COUNTS for each in fleet)
    if place is None or existing >= models.workers[service.name]:
        return ()
    name = _free_name(graph, service.name, fleet)
    return (
        Worker(
            name,
            service.name,
            service.role,
            gpus=place.gpus,
            memory_bytes=place.bytes_each if service.shares_memory else 0,
            since_s=now_s,
            reason=place.why,
        ),
    )


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
    service: ServiceSpec, fleet: tuple[Worker, ...], inventory: Sequence[Gpu], unusable: Mapping[int, str]
) -> str:
    held = {index for worker in fleet if worker.state in HOLDS_GPUS for index in worker.gpus}
    free = [gpu for gpu in inventory if gpu.index not in held and gpu.index not in unusable]
    why = f"it needs {service.gpus:g} GPU, {len(free)} of {len(inventory)} are free"
    others = {index: reason for index, reason in unusable.items() if index not in held}
    why += "".join(f"; {line}" for line in by_reason(others, inventory))
    draining = [worker.name for worker in fleet if worker.state is WorkerState.DRAINING and worker.gpus]
    return why + (f"; draining: {', '.join(draining)}" if draining else "")


REMOVALS = "removals"
"""The field of the published fleet with the last removals, the newest last."""

MAX_REMOVALS = 8
"""The removals that are published."""


@dataclass(frozen=True)
class Removal:
    """One worker that was drained, at ``at_unix_s`` on the wall clock, and why."""

    worker: str
    at_unix_s: float
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def removals_in(fleet: Mapping[str, Any]) -> tuple[Removal, ...]:
    """Read the removals of a published fleet; what cannot be read is left out."""
    found = []
    listed = fleet.get(REMOVALS)
    for each in listed if isinstance(listed, list) else ():
        try:
            known = each if isinstance(each, dict) else {}
            found.append(
                Removal(
                    text_field(known, "worker"), number_field(known, "at_unix_s"), text_field(known, "why")
                )
            )
        except ValueError:
            continue
    return tuple(found)
