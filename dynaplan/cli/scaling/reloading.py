"""The part of ``dynaplan reload`` that applies: live keys, rolling restarts, and the way back."""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from dynaplan.cli.scaling.restart import (
    FREED_WITHIN_S,
    POLL_S,
    WorkerRestart,
    restart_process,
    tell_to_replace,
)
from dynaplan.cli.scaling.waiting import times_of
from dynaplan.fleet.store_keys import SCALED_ROLES, live_settings_prefix
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.store.model import Transaction
from dynaplan.util.errors import DeploymentError, DynaplanError, PermanentError, TemporaryError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Reload
    from dynaplan.graph.model import GraphSpec, ServiceSpec
    from dynaplan.store.port import KeyValueStore

LOCK_FILE = "reload.lock"


class Reloading:
    """One reload of a deployment. ``new.before`` are the settings to go back to."""

    def __init__(
        self, found: RunningDeployment, graph: GraphSpec, new: Reload, timeout_s: float | None
    ) -> None:
        from dynaplan.fleet.launch import last_reload, read_launch

        self._found = found
        self._graph = graph
        self._new = new
        self._timeout_s = timeout_s
        launch = read_launch(found.runtime_dir)
        old = last_reload(found.runtime_dir)
        assert new.before is not None
        self._old = replace(
            old or new,
            config=new.before,
            config_file=launch.config_file,
            overrides=launch.overrides,
            before=None,
        )
        self._untouched: set[tuple[str, int]] = set()

    async def run(self, live: Mapping[str, str], services: Sequence[ServiceSpec]) -> None:
        """Apply it; raises PermanentError when a new worker fails, after the way back."""
        from dynaplan.store import connections

        with alone(self._found, "reload or upgrade"):
            store = connections.connect_store()
            try:
                await self._run(store, live, services)
            finally:
                await store.close()

    async def _run(
        self, store: KeyValueStore, live: Mapping[str, str], services: Sequence[ServiceSpec]
    ) -> None:
        begun_s = time.monotonic()
        self._untouched = {(each.name, each.pid) for each in self._workers()}
        before = await self._live(store, live)
        self._write(self._new)
        try:
            await self._put(store, live)
            for service in services:
                await self._roll(store, service)
        except asyncio.CancelledError:
            self._write(self._old)
            await self._put(store, before)
            click.echo(
                "Interrupted: the settings are those of before, for every worker that starts from now on. "
                "Workers that were replaced already keep the new ones until `dynaplan restart`.",
                err=True,
            )
            raise
        except DynaplanError as error:
            await self._go_back(store, before, services, error)
        self._write(replace(self._new, before=None))
        click.echo(f"reloaded after {time.monotonic() - begun_s:.1f} s")

    async def _roll(self, store: KeyValueStore, service: ServiceSpec) -> None:
        """Replace the workers of a service that have the settings of before."""
        workers = [each for each in self._present(service) if (each.name, each.pid) in self._untouched]
        patience_s = 0.0
        for number, worker in enumerate(workers, 1):
            if not self._is_there(worker):
                continue  # it has crashed or left meanwhile: what came in its place has the new settings
            begun_s = time.monotonic()
            if service.role in SCALED_ROLES:
                restart = WorkerRestart(store, self._found.namespace, worker, self._timeout_s)
                new = await restart.run(patience_s)
                patience_s = FREED_WITHIN_S if restart.was_beside else 0.0
            else:
                new = await restart_process(self._found, worker, self._timeout_s)
            which = f"{number} of {len(workers)}: " if len(workers) > 1 else ""
            click.echo(f"{which}{worker.name} -> {new} after {time.monotonic() - begun_s:.1f} s")

    async def _go_back(
        self,
        store: KeyValueStore,
        live: Mapping[str, str],
        services: Sequence[ServiceSpec],
        error: DynaplanError,
    ) -> None:
        """Have the settings of before everywhere, and raise PermanentError with what went wrong."""
        click.echo(f"{error.args[0]}\nGoing back to the settings of before.", err=True)
        self._write(self._old)
        await self._put(store, live)
        told = {(each.name, each.pid) for each in self._workers()} - self._untouched
        try:
            for service in reversed(services):
                for worker in self._present(service):
                    if (worker.name, worker.pid) not in told:
                        continue
                    if worker.state is WorkerState.READY and service.role in SCALED_ROLES:
                        await WorkerRestart(store, self._found.namespace, worker, self._timeout_s).run(
                            FREED_WITHIN_S
                        )
                    elif worker.state is not WorkerState.BACKOFF:
                        await tell_to_replace(self._found, worker)
            await self._all_ready(services)
        except DynaplanError as second:
            raise PermanentError(
                f"{error.args[0]}; and on the way back: {second.args[0]}",
                hint="The settings are those of before. `dynaplan status` shows what runs.",
            ) from error
        raise PermanentError(
            f"the new settings do not work: {error.args[0]}",
            hint="Every worker has the settings of before. `dynaplan logs NAME` says more of a failed one.",
        ) from error

    async def _all_ready(self, services: Sequence[ServiceSpec]) -> None:
        """Return when no worker of these services is on its way; TemporaryError after a while."""
        longest_s = self._timeout_s or times_of(
            self._found, {service.role: 1 for service in services}
        ).longest_s(starts=True, leaves=True)
        deadline_s = time.monotonic() + longest_s
        while True:
            states = {each.name: each.state for service in services for each in self._present(service)}
            others = [name for name, state in states.items() if state is not WorkerState.READY]
            if not others:
                return
            if time.monotonic() > deadline_s:
                raise TemporaryError(f"{', '.join(others)} not ready within {longest_s:g} s")
            await asyncio.sleep(POLL_S)

    def _write(self, settings: Reload) -> None:
        """Put the settings in the place of those before, whole or not at all."""
        from dynaplan.fleet.launch import RELOADED_FILE
        from dynaplan.fleet.runtime_dir import write_private

        file = self._found.runtime_dir / RELOADED_FILE
        new = file.with_suffix(".new")
        write_private(new, settings.to_json())
        new.replace(file)

    async def _live(self, store: KeyValueStore, names: Mapping[str, str]) -> dict[str, str]:
        """Return the values of these live keys now; empty for one that is not there."""
        prefix = live_settings_prefix(self._found.namespace)
        now = {item.key.removeprefix(prefix): item.value for item in await store.list(prefix)}
        return {name: now.get(name, "") for name in names}

    async def _put(self, store: KeyValueStore, values: Mapping[str, str]) -> None:
        """Write these live keys; delete those with an empty value."""
        prefix = live_settings_prefix(self._found.namespace)
        puts = {prefix + name: value for name, value in values.items() if value}
        deletes = tuple(prefix + name for name, value in values.items() if not value)
        if values:
            await store.commit(Transaction(puts=puts, deletes=deletes))
        for name, value in values.items():
            click.echo(f"{name}: {value or 'as configured'}, live")

    def _workers(self) -> tuple[Worker, ...]:
        from dynaplan.fleet.deployments import find_deployment

        return find_deployment(self._found.namespace).workers

    def _present(self, service: ServiceSpec) -> list[Worker]:
        return [each for each in self._workers() if each.component == service.name]

    def _is_there(self, worker: Worker) -> bool:
        return any((each.name, each.pid) == (worker.name, worker.pid) for each in self._workers())


@contextmanager
def alone(found: RunningDeployment, what: str) -> Iterator[None]:
    """Keep other reloads and upgrades of the deployment out; raises DeploymentError while one goes on."""
    descriptor = os.open(found.runtime_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DeploymentError(
            f"another {what} of {found.namespace} goes on", hint="Wait for its end."
        ) from None
    finally:
        os.close(descriptor)
