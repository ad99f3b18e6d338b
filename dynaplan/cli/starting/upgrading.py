"""The part of ``dynaplan upgrade`` that acts: the new ``serve``, then new workers, one after another."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING

import click

from dynaplan.cli.scaling.reloading import alone
from dynaplan.cli.scaling.restart import FREED_WITHIN_S, WorkerRestart, restart_process
from dynaplan.cli.starting.detaching import PROGRAM
from dynaplan.fleet.desired_counts import SCALED_ROLES
from dynaplan.fleet.heartbeat import PLUGIN_PULSE
from dynaplan.graph.lifecycle import Worker
from dynaplan.util.errors import DeploymentError, DynaplanError, PermanentError, TemporaryError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.reattach.versions import RunningServe
    from dynaplan.store.port import KeyValueStore

TAKEN_WITHIN_S = 150.0
"""Longest time for the new ``serve`` to be there, or the old one again: a trial of 60 s, and two starts."""

KEEPS_WITHIN_S = 30.0
"""Longest time for the new fleet plugin to keep the workers, in seconds."""

POLL_S = 0.1


class Upgrading:
    """One upgrade of a deployment, in which ``running`` is the ``serve`` that was found."""

    def __init__(
        self, found: RunningDeployment, running: RunningServe, timeout_s: float | None = None
    ) -> None:
        self._found = found
        self._running = running
        self._timeout_s = timeout_s
        self._old = running.not_renewed

    async def run(self, *, is_forced: bool = False) -> None:
        """Take over, and renew every worker.

        Raises PermanentError when the new version does not come up, or a new worker does not start.
        """
        from dynaplan.fleet.reattach.versions import own_version

        begun_s = time.monotonic()
        with alone(self._found, "reload or upgrade"):
            if is_forced or own_version() != self._running.version:
                self._running = await self._take_over()
                click.echo(f"serve: {self._running.version} after {time.monotonic() - begun_s:.1f} s")
            self._old = self._running.older if is_forced else self._running.not_renewed
            try:
                number = await self._renew()
            except DynaplanError as error:
                left = ", ".join(each.name for each in self._left()) or "none"
                raise PermanentError(
                    f"serve is of the new version, of the old one still {left}: {error.args[0]}",
                    hint="They go on. `dynaplan upgrade` again goes on with them; that of the old version's "
                    "environment goes back.",
                ) from error
        click.echo(f"upgraded after {time.monotonic() - begun_s:.1f} s: serve and {number} workers")

    async def _take_over(self) -> RunningServe:
        """Have this version's ``serve`` started in the place of the old; return it once it is there."""
        from dynaplan.fleet.circus_client import A_PERSON, CircusClient, CommandRefused
        from dynaplan.fleet.reattach.making_way import MAKE_WAY, request
        from dynaplan.fleet.reattach.versions import own_version

        circus = CircusClient(self._found.circus_endpoint, sender=A_PERSON)
        try:
            await circus.call(
                MAKE_WAY, **request(PROGRAM, os.environ, os.environ.get("DYNAPLAN_WORKER_TOKEN", ""))
            )
        except CommandRefused as error:
            raise DeploymentError(f"{self._found.namespace} makes no way: {error.args[0]}") from error
        finally:
            circus.close()
        now = await self._successor()
        if now.version != own_version():
            raise PermanentError(
                f"the new version's serve did not come up: {now.version} goes on",
                hint="Its output has the reason, above 'The other serve did not come up'; of a detached one "
                "`dynaplan logs serve` prints it. No worker was touched.",
            )
        await self._keeps(now)
        return now

    async def _successor(self) -> RunningServe:
        """Return the ``serve`` that comes after the one that was found; TemporaryError when none does."""
        from dynaplan.fleet.reattach.versions import read_serve

        deadline_s = time.monotonic() + TAKEN_WITHIN_S
        while time.monotonic() < deadline_s:
            now = read_serve(self._found.runtime_dir)
            if now and (now.pid, now.started_at) != (self._running.pid, self._running.started_at):
                return now
            await asyncio.sleep(POLL_S)
        raise TemporaryError(
            f"no serve has come within {TAKEN_WITHIN_S:g} s", hint="`dynaplan status` shows what runs."
        )

    async def _keeps(self, serve: RunningServe) -> None:
        """Return when the fleet plugin of that ``serve`` keeps the workers."""
        from dynaplan.fleet import local_host

        heartbeats = local_host.heartbeats(self._found.runtime_dir)
        deadline_s = time.monotonic() + KEEPS_WITHIN_S
        while time.monotonic() < deadline_s:
            pulse = heartbeats.read(PLUGIN_PULSE)
            if pulse and pulse.is_alive and pulse.process.started_at >= serve.started_at:
                return
            await asyncio.sleep(POLL_S)
        raise PermanentError(
            f"the new version's fleet plugin has not answered within {KEEPS_WITHIN_S:g} s",
            hint="The `dynaplan upgrade` of the old version's environment goes back. No worker was touched.",
        )

    async def _renew(self) -> int:
        """Replace all workers that are not of this version; return how many."""
        from dynaplan.store import connections

        store, patience_s = connections.connect_store(), 0.0
        tried: set[tuple[str, int]] = set()
        try:
            while left := [each for each in self._left() if (each.name, each.pid) not in tried]:
                worker, begun_s = left[0], time.monotonic()
                tried.add((worker.name, worker.pid))
                new, patience_s = await self._replaced(store, worker, patience_s)
                click.echo(f"{worker.name} -> {new} after {time.monotonic() - begun_s:.1f} s")
        finally:
            await store.close()
        return len(tried)

    async def _replaced(self, store: KeyValueStore, worker: Worker, patience_s: float) -> tuple[str, float]:
        """Replace one; return the name of the new one, and how long its GPU may take to be free."""
        if worker.role not in SCALED_ROLES:
            return await restart_process(self._found, worker, self._timeout_s), patience_s
        restart = WorkerRestart(store, self._found.namespace, worker, self._timeout_s)
        new = await restart.run(patience_s)
        return new, FREED_WITHIN_S if restart.was_beside else 0.0

    def _left(self) -> list[Worker]:
        from dynaplan.fleet.deployments import find_deployment

        return self._old(find_deployment(self._found.namespace).workers)
