"""``dynaplan restart [WORKER|ROLE]``: a new worker in the place of an old one, without dropping a request."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dynaplan.cli.by_hand import record_by_hand
from dynaplan.cli.options import namespace_option, step_timeout_option
from dynaplan.cli.running_deployment import connect, service_config
from dynaplan.cli.scale_args import new_hold
from dynaplan.cli.scale_counts import (
    GPU_RELEASE_S,
    MIN_WAIT_S,
    Change,
    expected_times,
    free_gpus,
    planner_settings,
    progress_watcher,
    wait_limit_s,
    write_counts,
)
from dynaplan.cli.timing import DRAIN_START_TIMEOUT_S, GPU_FREE_TIMEOUT_S, WORKERS_POLL_S
from dynaplan.config.model_entries import served_models
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.model_orders import change_order
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts, scaling_prefix
from dynaplan.graph.lifecycle import COUNTS, Role, Worker, WorkerState
from dynaplan.process.process_table import identity_of
from dynaplan.process.signals import run_interruptible
from dynaplan.util.errors import ConfigError, DynaplanError, PermanentError, TemporaryError, nearest
from dynaplan.util.progress import ProgressLine

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.store.port import KeyValueStore

FAILURES = (WorkerState.FAILED, WorkerState.BACKOFF)

HOLD_DURATION = "1h"
"""The time that a hold of this command says; it ends with the command, also where that is killed."""


@click.command(name="restart")
@click.argument("chosen", required=False, metavar="[WORKER|ROLE]")
@namespace_option
@step_timeout_option
def command(chosen: str | None, namespace: str | None, timeout: float | None) -> None:
    """Restart WORKER, all workers of ROLE, frontend included, or every engine worker, one after another.

    A new worker is ready before the old one is drained, and the planner keeps off that role meanwhile. Where
    no GPU is free for a new one, or within max-gpu-budget, the old one leaves first. When a new worker
    fails, or at Ctrl-C, the old one goes on, and the rest is left as it is.
    """
    found = connect(namespace)
    workers = chosen_workers(chosen, found.workers)
    record_by_hand(found, f"restart of {', '.join(each.name for each in workers)}")
    run_interruptible(_restart(found, workers, timeout))


def chosen_workers(chosen: str | None, workers: Sequence[Worker]) -> list[Worker]:
    """Return the workers of that name, role or component, or all of engines; ConfigError for another word.

    One that is leaving already is among them only by its own name.
    """
    staying = [each for each in workers if each.state in COUNTS]
    if chosen is None:
        return [worker for worker in staying if worker.role in SCALED_ROLES]
    own = [each for each in staying if chosen in (each.role.value, each.component)]
    if named := own or [each for each in workers if chosen == each.name]:
        return named
    names = dict.fromkeys(name for each in workers for name in (each.name, each.role.value))
    raise ConfigError(f"restart {chosen}: no such worker or role", hint=nearest(chosen, names))


async def _restart(found: RunningDeployment, workers: Sequence[Worker], timeout_s: float | None) -> None:
    from dynaplan.store import connections

    async with connections.open_store() as store:
        await replace_workers(store, found, workers, timeout_s, len(workers))


async def replace_workers(
    store: KeyValueStore,
    found: RunningDeployment,
    workers: Iterable[Worker],
    timeout_s: float | None,
    total: int = 0,
) -> int:
    """Replace one worker after another, and print each; return how many, of ``total`` where that is known."""
    number, gpu_wait_s = 0, 0.0
    for number, worker in enumerate(workers, 1):
        begun_s = time.monotonic()
        new, gpu_wait_s = await replace_worker(store, found, worker, timeout_s, gpu_wait_s)
        which = f"{number} of {total}: " if total > 1 else ""
        click.echo(f"{which}{worker.name} -> {new} after {time.monotonic() - begun_s:.1f} s")
    return number


async def replace_worker(
    store: KeyValueStore, found: RunningDeployment, worker: Worker, timeout_s: float | None, gpu_wait_s: float
) -> tuple[str, float]:
    """Replace one process of the deployment.

    Returns the new one's name, and the ``gpu_wait_s`` of the next call: the old worker's GPU is released a
    while after its exit. The worker of a model that is loaded on request is put away, and the name is then
    "the next request", which starts another.
    """
    served = served_models(service_config(found))
    models = {each.component: each.name for each in served}
    models |= {each.prefill.component: each.name for each in served if each.prefill}
    if worker.component in models:
        await _put_away(store, found, worker, models[worker.component], timeout_s)
        return "the next request", gpu_wait_s
    if worker.role not in SCALED_ROLES:
        return await restart_process(found, worker, timeout_s), gpu_wait_s
    restart = WorkerRestart(store, found.namespace, worker, timeout_s)
    new = await restart.run(gpu_wait_s)
    return new, GPU_FREE_TIMEOUT_S if restart.starts_new_first else 0.0


async def _put_away(
    store: KeyValueStore, found: RunningDeployment, worker: Worker, model: str, timeout_s: float | None
) -> None:
    """Have the worker of a model that is loaded on request leave; TemporaryError when it takes too long."""
    await change_order(store, found.namespace, model, {"unload_unix_s": time.time()})
    longest_s = timeout_s or expected_times(found, {worker.role: 1}).limit_s(starts=False, leaves=True)
    deadline_s = time.monotonic() + longest_s
    while any(each.process == worker.process for each in _present(found.namespace, worker.component)):
        if time.monotonic() > deadline_s:
            raise TemporaryError(f"{worker.name} has not left within {longest_s:g} s")
        await asyncio.sleep(WORKERS_POLL_S)


class WorkerRestart:
    """One worker's restart. ``timeout_s`` is the time of each step, None for as long as it may well take.

    ``starts_new_first`` is whether the new worker is started before the old one leaves; ``run`` decides it.
    """

    def __init__(
        self, store: KeyValueStore, namespace: str, worker: Worker, timeout_s: float | None = None
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._worker = worker
        self._timeout_s = timeout_s
        self._hold_before: Hold | None = None
        self._own_hold: Hold | None = None
        self._decision_id = -1
        self.starts_new_first = False

    async def run(self, gpu_wait_s: float = 0.0) -> str:
        """Restart the worker and return the new one's name; waits up to ``gpu_wait_s`` seconds for free GPUs.

        Raises PermanentError or TemporaryError when it fails; the old worker runs on.
        """
        from dynaplan.fleet.deployments import find_deployment
        from dynaplan.fleet.scale_progress import check_alive

        found = find_deployment(self._namespace)
        check_alive(found)
        before = {each.process for each in found.workers}
        self.starts_new_first = self._fits_budget(found) and await self._has_room(gpu_wait_s)
        await (self._start_then_drain(found) if self.starts_new_first else self._drain_then_start(found))
        new = self._new_workers(find_deployment(self._namespace), before)
        return next((each.name for each in new), "nobody, as fewer are asked for")

    def _fits_budget(self, found: RunningDeployment) -> bool:
        """Return whether the planner's GPU budget allows a second worker beside this one."""
        settings = planner_settings(found)
        own = [each for each in found.workers if each.role in SCALED_ROLES]
        gpus = sum(each.gpu_share * len(each.gpus) for each in (*own, self._worker))
        return settings is None or gpus <= settings.max_gpu_budget

    async def _has_room(self, gpu_wait_s: float) -> bool:
        """Return whether GPUs for one more worker are free, or become free within ``gpu_wait_s`` seconds."""
        deadline_s = time.monotonic() + gpu_wait_s
        while True:
            free = await free_gpus(self._store, self._namespace)
            if free is not None and free >= len(self._worker.gpus):
                return True
            if time.monotonic() >= deadline_s:
                return False
            await asyncio.sleep(WORKERS_POLL_S)

    async def _start_then_drain(self, found: RunningDeployment) -> None:
        """Scale up by one worker, then down by the old one."""
        from dynaplan.fleet.scale_progress import DecisionSuperseded

        name, role = self._worker.name, self._worker.role
        number = await self._hold(found, 1)
        try:
            await self._wait(number)
        except asyncio.CancelledError:
            await self._give_back(1)
            raise
        except DynaplanError as error:
            await self._give_back(1)
            raise PermanentError(
                f"no new worker took the place of {name}: {error.args[0]}",
                hint=f"{name} goes on. `dynaplan status` and `dynaplan logs` say more of the new one.",
            ) from error
        number = await self._give_back(1, leaving=name)
        try:
            await self._wait(number)
        except (
            DecisionSuperseded
        ):  # the planner goes on with its own numbers: the old one leaves all the same
            await self._wait_gone()
        if self._is_there():
            raise TemporaryError(
                f"{name} is still there: somebody else has changed the number of {role.value} workers",
                hint="Restart it again.",
            )

    async def _drain_then_start(self, found: RunningDeployment) -> None:
        """Drain the old worker, then wait for a new one on its GPU."""
        why = "no GPU is free for a second one, or the GPU budget has none"
        click.echo(f"{why}: {self._worker.name} leaves first", err=True)
        await self._hold(found, 0)
        try:
            await request_replacement(found, self._worker)
            times = expected_times(found, {self._worker.role: 1})
            longest = self._timeout_s or times.limit_s(starts=True, leaves=True)
            try:
                async with asyncio.timeout(longest):
                    while self._is_there():
                        await asyncio.sleep(WORKERS_POLL_S)
            except TimeoutError:
                raise TemporaryError(f"{self._worker.name} has not left within {longest:g} s") from None
            await self._wait_for_successor({each.process for each in found.workers}, longest)
        finally:
            await self._give_back(0)

    async def _wait_for_successor(self, before: Container[tuple[str, int]], longest_s: float) -> None:
        """Wait until a worker whose process was not there ``before`` is ready.

        Or, with no new one there, until those that stay are as many as are asked for.
        Others of the role are not waited for: they may wait for GPUs, or leave. Raises PermanentError when
        the new one fails, TemporaryError after ``longest_s`` seconds.
        """
        from dynaplan.fleet.scale_progress import check_alive

        deadline_s = time.monotonic() + longest_s
        while True:
            found = self._find()
            check_alive(found)
            new = self._new_workers(found, before)
            if any(each.state is WorkerState.READY for each in new):
                return
            if failed := [each for each in new if each.state is WorkerState.FAILED]:
                raise PermanentError(f"{failed[0].name} does not start: {failed[0].reason}")
            staying = sum(each.role is self._worker.role and each.state in COUNTS for each in found.workers)
            if not new and staying >= await self._asked_for(found):
                return
            if time.monotonic() > deadline_s:
                raise TemporaryError(
                    f"nothing has taken the place of {self._worker.name} within {longest_s:g} s"
                )
            await asyncio.sleep(WORKERS_POLL_S)

    def _new_workers(self, found: RunningDeployment, before: Container[tuple[str, int]]) -> list[Worker]:
        role = self._worker.role
        return [each for each in found.workers if each.role is role and each.process not in before]

    async def _asked_for(self, found: RunningDeployment) -> int:
        """Return the desired number of workers of the role; the present number when the store has none."""
        items = {item.key: item.value for item in await self._store.list(scaling_prefix(self._namespace))}
        number = DesiredCounts.from_keys(self._namespace, items).of(self._worker.role)
        return number if number >= 0 else sum(each.role is self._worker.role for each in found.workers)

    async def _wait_gone(self) -> None:
        """Wait until the old worker has gone; return, without an error, also when it is not gone in time."""
        times, begun_s = expected_times(self._find(), {self._worker.role: 1}), time.monotonic()
        longest = self._timeout_s or times.limit_s(starts=False, leaves=True)
        while old := self._old():
            limit_s = longest if old.state is WorkerState.DRAINING else DRAIN_START_TIMEOUT_S
            if time.monotonic() - begun_s > limit_s:
                return
            await asyncio.sleep(WORKERS_POLL_S)

    def _old(self) -> Worker | None:
        own = self._worker.process
        return next((each for each in self._find().workers if each.process == own), None)

    def _is_there(self) -> bool:
        return self._old() is not None

    def _find(self) -> RunningDeployment:
        from dynaplan.fleet.deployments import find_deployment

        return find_deployment(self._namespace)

    async def _hold(self, found: RunningDeployment, more: int) -> int:
        """Ask for so many more workers of the role, held so that the planner keeps off; return the number."""
        role = self._worker.role
        present = sum(each.role is role for each in found.workers)
        ours = identity_of(os.getpid())

        def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
            number = (now.of(role) if now.of(role) >= 0 else present) + more
            self._hold_before = holds.of(role)
            self._own_hold = replace(new_hold(HOLD_DURATION), at_least=number, at_most=number, holder=ours)
            return {role: number} if more else {}, holds.replaced(role, self._own_hold)

        return await self._write(change)

    async def _give_back(self, more: int, leaving: str = "") -> int:
        """Undo ``_hold``: ask for so many fewer workers, and restore the earlier hold; return the number.

        A hold that somebody has made or ended since stays as it is. No fewer are asked for where it forbids
        that, or somebody has asked for another number. ``leaving`` names the worker that is to leave.
        """
        role, own = self._worker.role, self._own_hold
        assert own

        def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
            hold, number = holds.of(role), own.at_least - more
            is_own = hold == own
            is_free = is_own or hold is None or hold.allows(number)
            is_taken_back = more and is_free and now.of(role) == own.at_least
            after = holds.replaced(role, self._hold_before) if is_own else holds
            return {role: number} if is_taken_back else {}, after

        return await self._write(change, leaving)

    async def _write(self, change: Change, leaving: str = "") -> int:
        written = await write_counts(self._store, self._namespace, change, leaving)
        self._decision_id = written.decision_id
        return written.counts.of(self._worker.role)

    async def _wait(self, number: int) -> None:
        from dynaplan.fleet.deployments import find_deployment
        from dynaplan.fleet.scale_progress import ScaleRequest, wait_carried_out

        found = find_deployment(self._namespace)
        wanted = {self._worker.role: number}
        times = expected_times(found, wanted)
        longest = self._timeout_s or wait_limit_s(found, wanted, times)
        with ProgressLine() as line:
            request = ScaleRequest(self._decision_id, wanted)
            await wait_carried_out(found, self._store, request, longest, progress_watcher(times, line))


async def restart_process(found: RunningDeployment, worker: Worker, timeout_s: float | None = None) -> str:
    """Replace a frontend, or another process without GPUs; return the new one's name when the old is gone.

    A new frontend accepts connections before the old one stops to, and the old one finishes its streams.
    Raises PermanentError when the new one does not start, and TemporaryError after ``timeout_s`` seconds.
    """
    earlier = _present(found.namespace, worker.component)
    failures = [each for each in earlier if each.state in FAILURES]
    number = sum(each.state in COUNTS and each not in failures for each in earlier)
    broken = {each.name for each in failures} - {worker.name}
    await request_replacement(found, worker)
    if timeout_s is None:
        timeout_s = MIN_WAIT_S + expected_times(found, {worker.role: 1}).leave_s + GPU_RELEASE_S
    before = {each.process for each in earlier}
    deadline_s = time.monotonic() + timeout_s
    while True:
        present = _present(found.namespace, worker.component)
        ready = [each for each in present if each.state is WorkerState.READY]
        new = [each for each in ready if each.process not in before]
        is_there = any(each.process == worker.process for each in present)
        if new and len(ready) >= number and not is_there:
            return new[0].name
        failures = [each for each in failures if each in present]  # until the plugin has taken them up
        failed = [each for each in present if each.state in FAILURES and each not in failures]
        failed = [each for each in failed if each.name not in broken]  # these may fail again and again
        if failed:
            raise PermanentError(f"{failed[0].name} does not start: {failed[0].reason}")
        if time.monotonic() > deadline_s:
            raise TemporaryError(f"nothing has taken the place of {worker.name} within {timeout_s:g} s")
        await asyncio.sleep(WORKERS_POLL_S)


async def request_replacement(found: RunningDeployment, worker: Worker) -> None:
    """Ask the fleet plugin, over circus, to replace this worker."""
    from dynaplan.fleet.circus_client import A_PERSON, CircusClient

    circus = CircusClient(found.circus_endpoint, sender=A_PERSON)
    try:
        await circus.call("restart", name=worker.name)
    finally:
        circus.close()


def _present(namespace: str, component: str) -> list[Worker]:
    from dynaplan.fleet.deployments import find_deployment

    return [each for each in find_deployment(namespace).workers if each.component == component]
