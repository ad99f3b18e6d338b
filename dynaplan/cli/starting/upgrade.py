"""``dynaplan upgrade``: this version takes over a running deployment, without dropping a request.

First ``serve``: ``fleet/reattach/versions.py`` says how. Then the workers, one after another.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import connect, namespace_argument
from dynaplan.cli.scaling.reloading import alone
from dynaplan.cli.scaling.restart import FREED_WITHIN_S, WorkerRestart, restart_process
from dynaplan.cli.starting.detaching import PROGRAM
from dynaplan.fleet.heartbeats import PLUGIN_HEARTBEAT
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Worker
from dynaplan.util.errors import DeploymentError, DynaplanError, PermanentError, TemporaryError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Launch
    from dynaplan.fleet.reattach.versions import RunningServe
    from dynaplan.store.port import KeyValueStore

STOP_AND_SERVE = "`dynaplan stop`, then `dynaplan serve`, starts this version."

TAKEN_WITHIN_S = 150.0
"""Longest time for the new ``serve`` to be there, or the old one again: a trial of 60 s, and two starts."""

KEEPS_WITHIN_S = 30.0
"""Longest time for the new fleet plugin to keep the workers, in seconds."""

POLL_S = 0.1


@click.command(name="upgrade")
@namespace_argument
@click.option("--force", is_flag=True, help="Also where this version runs already.")
@click.option("--timeout", type=click.FloatRange(0.0), help="Seconds that each start or drain may take.")
def command(namespace: str | None, force: bool, timeout: float | None) -> None:
    """Have the version of dynaplan that runs this command take over a deployment of another version.

    Run it from the new version's environment. `serve` is replaced, and adopts what runs; if the new one does
    not come up, the old one goes on. Then every worker, frontends and planner included, is renewed: a new one
    is ready before the old one is drained. An interrupted upgrade goes on when it is run again; the old
    version's own `dynaplan upgrade` goes back.
    """
    _check_format(namespace)
    found = connect(namespace)
    running = check_version(found, force=force)
    check_configuration(_launch_of(found))
    asyncio.run(Upgrading(found, running, timeout).run(is_forced=force))


def _check_format(namespace: str | None) -> None:
    """Raise DeploymentError for a statefile of a format that this version does not know."""
    from dynaplan.fleet.deployments import statefiles
    from dynaplan.fleet.rules.statefile import VERSION

    for path in statefiles(namespace):
        try:
            version = int(json.loads(path.read_text()).get("version", VERSION))
        except (OSError, ValueError, TypeError, AttributeError):
            continue
        if version > VERSION:
            raise DeploymentError(
                f"{path} is of format {version}, and this dynaplan reads formats up to {VERSION}",
                hint=f"A newer dynaplan runs there. {STOP_AND_SERVE}",
            )


def check_version(found: RunningDeployment, *, force: bool) -> RunningServe:
    """Return the ``serve`` that runs; raises DeploymentError when it cannot be replaced, or needs not be."""
    from dynaplan.fleet.reattach.versions import own_version, read_serve

    if (owner := os.stat(found.runtime_dir).st_uid) != os.getuid():
        raise DeploymentError(
            f"{found.namespace} is of the user with the id {owner}", hint="Run this as that user."
        )
    running = read_serve(found.runtime_dir)
    if running is None:
        raise DeploymentError(
            f"{found.namespace} was started by a version that cannot be upgraded", hint=STOP_AND_SERVE
        )
    if running.pid == found.arbiter.pid:
        raise DeploymentError(
            f"{found.namespace} has no holder, which starts the next serve: it runs with --no-supervise",
            hint=STOP_AND_SERVE,
        )
    if own_version() == running.version and not force and not running.not_renewed(found.workers):
        raise DeploymentError(
            f"{found.namespace} runs {running.version} already",
            hint="Run this from the new version's environment, or with --force.",
        )
    return running


def _launch_of(found: RunningDeployment) -> Launch:
    from dynaplan.fleet.launch import read_launch

    try:
        return read_launch(found.runtime_dir)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"this version cannot read how {found.namespace} was started: {error}", hint=STOP_AND_SERVE
        ) from error


def check_configuration(launch: Launch) -> None:
    """Raise a UserError where this version, in this environment, cannot run the graph or its settings."""
    from dynaplan.cli.starting.checking import check_settings
    from dynaplan.cli.starting.serve import warn
    from dynaplan.graph.graph import load_graph
    from dynaplan.graph.resolve import resolve_graph
    from dynaplan.graph.validation import validate_config

    here, directory = Path.cwd(), Path(launch.graph.working_dir)
    os.chdir(directory)
    try:
        graph = load_graph(launch.graph.identifier, directory)
        warnings = validate_config(graph, launch.config)
        spec = resolve_graph(graph, launch.config, launch.namespace)
        warn(warnings + check_settings(graph, spec, launch.config))
    finally:
        os.chdir(here)


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
        from dynaplan.fleet.reattach.versions import own_version, take_over

        try:
            take_over(self._found.runtime_dir, self._running, PROGRAM, os.environ.get("PYTHONPATH"))
        except OSError as error:
            raise DeploymentError(
                f"serve of {self._found.namespace} cannot be replaced: {error}",
                hint="Run it again when `dynaplan status` says that it is there.",
            ) from error
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
        from dynaplan.fleet.heartbeats import HeartbeatFiles

        heartbeats = HeartbeatFiles.of(self._found.runtime_dir)
        deadline_s = time.monotonic() + KEEPS_WITHIN_S
        while time.monotonic() < deadline_s:
            heartbeat = heartbeats.read(PLUGIN_HEARTBEAT)
            if heartbeat and heartbeat.is_alive and heartbeat.process.started_at >= serve.started_at:
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
