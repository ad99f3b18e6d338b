"""``dynaplan upgrade``: this version takes over a running deployment, without dropping a request."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import connect, namespace_argument
from dynaplan.util.errors import DeploymentError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.fleet.launch import Launch
    from dynaplan.fleet.reattach.versions import RunningServe

STOP_AND_SERVE = "`dynaplan stop`, then `dynaplan serve`, starts this version."


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
    from dynaplan.cli.starting.upgrading import Upgrading

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
    from dynaplan.graph.config import resolve_graph, validate_config
    from dynaplan.graph.loading import load_graph

    here, directory = Path.cwd(), Path(launch.graph.working_dir)
    os.chdir(directory)
    try:
        graph = load_graph(launch.graph.identifier, directory)
        warnings = validate_config(graph, launch.config)
        spec = resolve_graph(graph, launch.config, launch.namespace)
        warn(warnings + check_settings(graph, spec, launch.config))
    finally:
        os.chdir(here)
