"""Observing: from the workers and the world as seen now to the workers as they are after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dynaplan.contract.counts import WorkerCounts
from dynaplan.contract.store_keys import COUNT_KEYS, DesiredCounts
from dynaplan.fleet.rules.restarting import (
    after_exit,
    after_out_of_memory,
    after_process_ended,
    exit_reason,
    shows_out_of_memory,
)
from dynaplan.graph.lifecycle import COUNTS, Worker, WorkerEvent, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.store.instances import Instance

Workers = Mapping[str, Worker]
"""The workers of one deployment by their watchers' names."""


@dataclass(frozen=True)
class Exit:
    """A worker's process is gone, and with it everything in its session.

    ``code`` is negative for a signal and None when it is not known; ``last_lines`` are the end of its log;
    ``killer`` describes what ended it, where that is known.
    """

    code: int | None = None
    last_lines: str = ""
    killer: str = ""


@dataclass(frozen=True)
class World:
    """The world at one moment: the exits, and the registrations of the processes that run now.

    ``instances`` is None until the registrations are known. ``gone`` are the workers whose process has ended,
    and whose exit is still waited for.
    """

    now_s: float
    exits: Mapping[str, Exit] = field(default_factory=dict)
    instances: Mapping[str, Instance] | None = None
    gone: Collection[str] = ()


@dataclass(frozen=True)
class Observed:
    """The workers as they are now; leases to revoke, because their processes are gone; lines for the user.

    ``started_s`` is the start-up time, in seconds, of each worker seen registered for the first time.
    """

    workers: Workers
    dead_leases: tuple[int, ...] = ()
    started_s: Mapping[str, float] = field(default_factory=dict)
    news: tuple[str, ...] = ()


def observe(workers: Workers, world: World) -> Observed:
    """Return the workers as they are after the exits, and by the registrations, of ``world``."""
    after: dict[str, Worker] = {}
    leases: list[int] = []
    news: list[str] = []
    for name, worker in workers.items():
        exit_ = world.exits.get(name)
        if exit_ is None:
            is_gone = name in world.gone
            after[name] = after_process_ended(worker, world.now_s) if is_gone else _registered(worker, world)
        else:
            after[name] = _ended(worker, exit_, world.now_s)
            leases += [worker.instance_id] if worker.instance_id else []
            count = _count(workers, worker.component)
            news += _news_of(after[name], exit_, world.now_s, count, had_gpus=bool(worker.gpus))
    started_s = {
        name: world.now_s - worker.since_s
        for name, worker in workers.items()
        if worker.state is WorkerState.STARTING and worker.since_s and after[name].url and not worker.url
    }
    return Observed(after, tuple(leases), started_s, tuple(news))


def _ended(worker: Worker, exit_: Exit, now_s: float) -> Worker:
    is_loading = worker.state is WorkerState.STARTING and not worker.url
    if is_loading and worker.memory_bytes and shows_out_of_memory(f"{exit_.last_lines} {exit_.killer}"):
        return after_out_of_memory(worker, now_s)
    after = after_exit(worker, exit_.code, now_s, killer=exit_.killer)
    has_failed = after.state is WorkerState.FAILED and bool(exit_.last_lines)
    return replace(after, reason=f"{after.reason}\n{exit_.last_lines}") if has_failed else after


def _news_of(worker: Worker, exit_: Exit, now_s: float, count: int, *, had_gpus: bool) -> list[str]:
    """Return lines for the user about a worker's end; none where it was asked for.

    ``count`` is the number of workers of its component; ``had_gpus`` is of the worker before its end.
    """
    if worker.state is WorkerState.FAILED:
        lines = "".join(f"\n    {line}" for line in worker.reason.splitlines())
        retry_s = worker.retry_at_s - now_s
        when = f"it is tried again in {retry_s:.0f} s" if retry_s > 0 else "it is not started again"
        freed = ", its GPUs are free" if had_gpus else ""
        again = f"`dynaplan scale {worker.role.value}={count}` tries again at once."
        way_out = f"\n    {again}" if worker.role in COUNT_KEYS else ""
        return [f"{worker.name} has failed; {when}{freed}.{lines}{way_out}"]
    if worker.state is WorkerState.BACKOFF:
        delay_s = max(0.0, worker.retry_at_s - now_s)
        when = f"in {delay_s:.1f} s" if delay_s else "at once"
        return [
            f"{worker.name} ended unasked ({exit_reason(exit_.code, exit_.killer)}); it starts again {when}."
        ]
    return []


def _registered(worker: Worker, world: World) -> Worker:
    if world.instances is None:
        return worker
    instance = world.instances.get(worker.name)
    if worker.state is WorkerState.DRAINING and instance is not None:
        # Told to leave while it loaded: it may have requests now, and gets the time that those need.
        return replace(worker, url=instance.url)
    if worker.state not in (WorkerState.STARTING, WorkerState.READY):
        return worker
    if instance is None:
        is_lost = worker.state is WorkerState.READY
        lost = replace(worker, instance_id=0)
        return lost.after(WorkerEvent.UNREGISTERED, world.now_s) if is_lost else worker
    known = replace(worker, instance_id=instance.instance_id, url=instance.url)
    is_known = worker.state is WorkerState.READY
    return known if is_known else known.after(WorkerEvent.REGISTERED, world.now_s)


def suspects(workers: Workers, hang_timeout_s: Callable[[str], float]) -> dict[str, str]:
    """Return the workers that may stand still, with their addresses: they lost their registration unasked.

    A worker that an outsider has drained is among them, and answers. A worker that was never registered is
    not: its engine judges its start-up time. ``hang_timeout_s`` is in seconds by component; 0 is "never".
    """
    return {
        name: worker.url
        for name, worker in workers.items()
        if worker.state is WorkerState.STARTING
        and worker.pid
        and worker.url
        and hang_timeout_s(worker.component) > 0
    }


def hung(
    workers: Workers, silent_s: Mapping[str, float], hang_timeout_s: Callable[[str], float]
) -> tuple[Worker, ...]:
    """The suspects that have not answered for their component's ``health-timeout``."""
    return tuple(
        workers[name]
        for name in suspects(workers, hang_timeout_s)
        if silent_s.get(name, 0.0) >= hang_timeout_s(workers[name].component)
    )


def own_instances(workers: Workers, instances: Iterable[Instance]) -> dict[str, Instance]:
    return {
        each.worker: each
        for each in instances
        if (worker := workers.get(each.worker)) and worker.pid and worker.pid == each.pid
    }


def desired_workers(graph: GraphSpec, counts: DesiredCounts | None, workers: Workers) -> dict[str, int]:
    """Return the number of workers that each service is to have.

    A scaled service has the decided number, or its present number until a decision is known. The others have
    the number in the configuration, and those of models that are loaded on request none.
    """
    desired = {each.name: each.first_workers for each in graph.services if not each.in_process_of}
    known = counts or DesiredCounts()
    for service in scaled_services(graph):
        decided = known.of(service.role)
        desired[service.name] = decided if decided >= 0 else _count(workers, service.name)
    return desired


def _count(workers: Workers, component: str) -> int:
    return sum(worker.component == component and worker.state in COUNTS for worker in workers.values())


def first_counts(graph: GraphSpec, workers: Workers, before: DesiredCounts) -> dict[str, str] | None:
    """Return the keys, without their prefix, of a first decision: the present numbers of workers.

    A count that was decided already stays as it is; None when all are decided.
    """
    counts: dict[str, str] = {}
    for service in scaled_services(graph):
        if before.of(service.role) < 0:
            counts[COUNT_KEYS[service.role]] = str(_count(workers, service.name))
    return {**counts, "decision_id": str(before.next_decision_id)} if counts else None


def is_carried_out(
    graph: GraphSpec, workers: Workers, desired: Mapping[str, int], instances: Iterable[Instance]
) -> bool:
    """Tell whether every wanted worker is ready or has failed, and every other one has left discovery."""
    registered = {each.worker for each in instances}
    for service in scaled_services(graph):
        own = [worker for worker in workers.values() if worker.component == service.name]
        settled = sum(worker.state in (WorkerState.READY, WorkerState.FAILED) for worker in own)
        if settled != desired[service.name] or settled != _count(workers, service.name):
            return False
        if any(worker.state not in COUNTS and worker.name in registered for worker in own):
            return False
    return True


def scaled_services(graph: GraphSpec) -> tuple[ServiceSpec, ...]:
    """Return the services whose number of workers is decided at run time: one prefill, one decode."""
    services = (graph.of_role(role) for role in COUNT_KEYS)
    return tuple(service for service in services if service and not service.in_process_of)


def unmanaged(instances: Iterable[Instance]) -> tuple[Instance, ...]:
    """Return one registration of each worker that was started without ``serve``, by name."""
    found = {each.worker: each for each in instances if not each.is_managed}
    return tuple(found[name] for name in sorted(found))


def _state_label(worker: Worker, asleep: Container[int]) -> str:
    """Return the state in which a worker is counted: a ready one may sleep."""
    is_asleep = worker.state is WorkerState.READY and worker.instance_id in asleep
    return WorkerCounts.ASLEEP if is_asleep else worker.state.value


def fleet_document(
    graph: GraphSpec,
    workers: Workers,
    gpus_total: int,
    instances: Iterable[Instance] = (),
    asleep: Container[int] = (),
) -> dict[str, Any]:
    """Return the document that is published about the fleet: workers by role and state, and the GPUs.

    Unmanaged workers, which are registered in ``instances`` only, are counted apart; and so are ready ones
    whose instance ids are among those ``asleep``.
    """
    alone = [each.component for each in unmanaged(instances)]
    states = Counter((worker.component, _state_label(worker, asleep)) for worker in workers.values())
    services = scaled_services(graph)
    return {
        "roles": {
            service.role.value: {state: states[service.name, state] for state in WorkerCounts.STATES}
            for service in services
        },
        "gpus_total": gpus_total,
        "gpus_per_worker": {service.role.value: service.gpus for service in services},
        "unmanaged": {service.role.value: alone.count(service.name) for service in services},
    }
