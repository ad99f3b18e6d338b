"""``dynaplan status``: every worker of the running deployments, as tables or as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import json_option, namespace_argument, store_option
from dynaplan.cli.running_deployment import connected
from dynaplan.cli.status_document import (
    DeploymentState,
    StatusReader,
    deployment_document,
    read_keys,
    read_routing,
    store_document,
)
from dynaplan.cli.status_poller import StatusPoller
from dynaplan.cli.status_view import render_page, view_of
from dynaplan.cli.timing import SCREEN_POLL_S
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.servers import FILE, KUBERNETES, has_store_address, store_backend
from dynaplan.util import screen
from dynaplan.util.errors import DeploymentError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

DEFAULT_NAMESPACE = PlannerSettings.namespace


@click.command(name="status")
@namespace_argument
@store_option
@json_option
@click.option("-w", "--watch", is_flag=True, help="Again every second, with the load and the GPUs.")
def command(namespace: str | None, as_json: bool, watch: bool) -> None:
    """Show the workers: role, state, GPUs, pid, running and waiting requests, KV usage, uptime, restarts.

    Above them stand the model, the planner's policy, the workers that are asked for, free GPUs, addresses and
    the directory of the logs. Without NAMESPACE every deployment that runs here has a table of its own; when
    none does, the components of the store that the environment names are shown. A worker whose engine starts
    is "loading", with the time that it usually takes. A worker whose GPU is not free is "waiting"; below the
    table stands what has the GPU. `dynaplan top` is `--watch` with keys.
    """
    if watch:
        asyncio.run(_watch(namespace, as_json=as_json))
        return
    documents = _documents(namespace)
    if as_json:
        document = documents[0] if len(documents) == 1 else {"deployments": documents}
        click.echo(json.dumps(document, indent=2))
        return
    width, now_s = screen.width(), time.time()
    click.echo("\n\n".join(render_page(view_of(document, now_s), width) for document in documents))


def _documents(namespace: str | None) -> list[dict[str, Any]]:
    """Return the JSON form of each deployment, or of what is in the store."""
    from dynaplan.fleet.deployments import find_deployments

    try:
        found = find_deployments(namespace)
    except DeploymentError:
        is_named = has_store_address(os.environ)
        if not is_named and store_backend(os.environ) not in (FILE, KUBERNETES):
            raise
        name = namespace or DEFAULT_NAMESPACE
        of_store = store_document(name, *asyncio.run(_asked(name)))
        if not is_named and not of_store["workers"] and not of_store["not_callable"]:
            raise  # nothing at the store's usual place: nobody has meant it
        return [of_store]
    documents = []
    for each in found:
        with connected(each):
            documents.append(deployment_document(each, *asyncio.run(_asked(each.namespace, each))))
    return documents


async def _asked(
    namespace: str, found: RunningDeployment | None = None
) -> tuple[DeploymentState, dict[str, dict[str, str]]]:
    """Ask the store, the workers and the frontends once."""
    reader = StatusReader(namespace)
    try:
        answers = await reader.read(found.workers if found else ())
        keys = await read_keys(found, answers.registered) if found else ()
        return replace(answers, keys=keys), await read_routing(answers.registered)
    finally:
        await reader.close()


async def _watch(namespace: str | None, *, as_json: bool) -> None:
    """Print the page again and again, over the last one on a terminal, until Ctrl-C."""

    poller = StatusPoller(namespace)
    try:
        while True:
            document = await poller.poll()
            if as_json:
                click.echo(json.dumps(document, separators=(",", ":")))
            else:
                screen.repaint(render_page(view_of(document, time.time()), screen.width()))
            await asyncio.sleep(SCREEN_POLL_S)
    finally:
        await poller.close()
