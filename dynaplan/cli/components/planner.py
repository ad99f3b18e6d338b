"""``dynaplan planner``: the planner on its own, its options as flags."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import click

from dynaplan.cli.components.flags import ComponentCommand, known_flags
from dynaplan.cli.deployment import join, store_option
from dynaplan.config import stock
from dynaplan.config.overrides import sections_of
from dynaplan.config.settings.planner import KUBERNETES, PlannerSettings


@click.command(
    cls=ComponentCommand,
    name="planner",
    table=stock.PLANNER,
    listed=stock.PLANNER,
    heading="Options of the planner",
)
@store_option
@click.pass_context
def command(ctx: click.Context) -> None:
    """Plan for a deployment: the one whose store ETCD_ENDPOINTS names, or the one that runs here.

    With --store nats or file, NATS_SERVER or DYN_FILE_KV names the store. With --environment kubernetes it
    plans for a cluster, with the credentials of its pod or of KUBECONFIG.
    """
    from dynaplan.planner.assembly import run_planner
    from dynaplan.process.logfile import configure_logging

    section = sections_of(ctx.obj, ["Planner"])["Planner"]
    settings = PlannerSettings.from_options({**section, **known_flags(ctx)})
    if settings.environment != KUBERNETES and (found := join(settings.namespace)):
        os.environ.setdefault("DYNAPLAN_LOG_DIR", str(found.log_dir))
    configure_logging()
    asyncio.run(_until_told(run_planner(settings)))


async def _until_told(planning: Any) -> None:
    """Plan until SIGINT or SIGTERM."""
    task = asyncio.ensure_future(planning)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        click.echo("stopped")
