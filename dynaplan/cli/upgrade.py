"""``dynaplan upgrade``: this version takes over a running deployment, without dropping a request.

First ``serve``, as ``fleet/reattach/versions.py`` describes. Then the workers, one after another.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynaplan.cli.detach import PROGRAM
from dynaplan.cli.options import namespace_argument, step_timeout_option
from dynaplan.cli.reload import reload_lock
from dynaplan.cli.restart import replace_workers
from dynaplan.cli.running_deployment import connect
from dynaplan.cli.serve import warn
from dynaplan.cli.serve_checks import check_settings
from dynaplan.cli.timing import PLUGIN_TIMEOUT_S, SERVE_POLL_S, TAKE_OVER_TIMEOUT_S
from dynaplan.fleet.launch import read_launch
from dynaplan.fleet.reattach.versions import own_version, read_serve, take_over
from dynaplan.graph.config import check_sections, resolve_graph
from dynaplan.graph.lifecycle import Worker
from dynaplan.graph.loading import load_graph
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, HeartbeatFiles
from dynaplan.process.signals import run_interruptible
from dynaplan.store import connections
from dynaplan.util.errors import DeploymentError, DynaplanError, PermanentError, TemporaryError, all_faults

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Launch
    from dynaplan.fleet.reattach.versions import RunningServe

STOP_AND_SERVE = "`dynaplan stop`, then `dynaplan serve`, starts this version."


@click.command(name="upgrade")
@namespace_argument
@click.option("--force", is_flag=True, help="Also where this version runs already.")
@step_timeout_option
def command(namespace: str | None, force: bool, timeout: float | None) -> None:
    """Have the version of dynaplan that runs this command take over a deployment of another version.

    Run it from the new version's environment. `serve` is replaced, and adopts what runs; if the new one does
    not come up, the old one goes on. Then every worker, frontends and planner included, is renewed: a new one
    is ready before the old one is drained. An interrupted upgrade goes on when it is run again; the old
    version's own `dynaplan upgrade` goes back, and renews every worker once more.
    """
    found = connect(namespace)
    running = check_version(found, force=force)
    check_configuration(_read_launch(found))
    run_interruptible(Upgrade(found, running, timeout).run(is_forced=force))


def check_version(found: RunningDeployment, *, force: bool) -> RunningServe:
    """Return the ``serve`` that runs; raises DeploymentError when it cannot be replaced, or needs not be."""

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
            f"{found.namespace} has no supervisor, which starts the next serve: it runs with --no-supervise",
            hint=STOP_AND_SERVE,
        )
    if own_version() == running.version and not force and not running.not_renewed(found.workers):
        raise DeploymentError(
            f"{found.namespace} runs {running.version} already",
            hint="Run this from the new version's environment, or with --force.",
        )
    return running


def _read_launch(found: RunningDeployment) -> Launch:
    try:
        return read_launch(found.runtime_dir)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise DeploymentError(
            f"this version cannot read how {found.namespace} was started: {error}", hint=STOP_AND_SERVE
        ) from error


def check_configuration(launch: Launch) -> None:
    """Raise a UserError where this version, in this environment, cannot run the graph or its settings."""

    here, directory = Path.cwd(), Path(launch.graph.working_dir)
    os.chdir(directory)
    try:
        graph = load_graph(launch.graph.identifier, directory)
        with all_faults() as faults:
            warnings = check_sections(graph, launch.config, faults)
            spec = resolve_graph(graph, launch.config, launch.namespace)
            warnings += check_settings(graph, spec, launch.config, faults)
        warn(warnings)
    finally:
        os.chdir(here)


class Upgrade:
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

        Raises PermanentError when the new version or a new worker does not start.
        """

        begun_s = time.monotonic()
        with reload_lock(self._found):
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
        """Replace the old ``serve`` by this version's; return the new one once it runs."""
        try:
            take_over(self._found.runtime_dir, self._running, PROGRAM, os.environ.get("PYTHONPATH"))
        except OSError as error:
            raise DeploymentError(
                f"serve of {self._found.namespace} cannot be replaced: {error}",
                hint="Run it again when `dynaplan status` says that it is there.",
            ) from error
        now = await self._wait_successor()
        if now.version != own_version():
            raise PermanentError(
                f"the new version's serve did not come up: {now.version} goes on",
                hint="Its output has the reason, above 'The other serve did not come up'; of a detached one "
                "`dynaplan logs serve` prints it. No worker was touched.",
            )
        await self._wait_plugin(now)
        return now

    async def _wait_successor(self) -> RunningServe:
        """Return the ``serve`` that follows the one that was found; TemporaryError when none does."""

        deadline_s = time.monotonic() + TAKE_OVER_TIMEOUT_S
        while time.monotonic() < deadline_s:
            now = read_serve(self._found.runtime_dir)
            if now and (now.pid, now.started_at) != (self._running.pid, self._running.started_at):
                return now
            await asyncio.sleep(SERVE_POLL_S)
        raise TemporaryError(
            f"no serve has come within {TAKE_OVER_TIMEOUT_S:g} s", hint="`dynaplan status` shows what runs."
        )

    async def _wait_plugin(self, serve: RunningServe) -> None:
        """Return when the fleet plugin of that ``serve`` is alive; PermanentError when it is not in time."""

        heartbeats = HeartbeatFiles.of(self._found.runtime_dir)
        deadline_s = time.monotonic() + PLUGIN_TIMEOUT_S
        while time.monotonic() < deadline_s:
            heartbeat = heartbeats.read(PLUGIN_HEARTBEAT)
            if heartbeat and heartbeat.is_alive and heartbeat.process.started_at >= serve.started_at:
                return
            await asyncio.sleep(SERVE_POLL_S)
        raise PermanentError(
            f"the new version's fleet plugin has not answered within {PLUGIN_TIMEOUT_S:g} s",
            hint="The `dynaplan upgrade` of the old version's environment goes back. No worker was touched.",
        )

    async def _renew(self) -> int:
        """Replace all workers that are not of this version; return how many."""

        async with connections.open_store() as store:
            return await replace_workers(store, self._found, self._not_tried(), self._timeout_s)

    def _not_tried(self) -> Iterator[Worker]:
        """Yield the workers that are left to renew, read afresh before each; none is yielded twice."""
        tried: set[tuple[str, int]] = set()
        while left := [each for each in self._left() if each.process not in tried]:
            tried.add(left[0].process)
            yield left[0]

    def _left(self) -> list[Worker]:
        from dynaplan.fleet.deployments import find_deployment

        return self._old(find_deployment(self._found.namespace).workers)
