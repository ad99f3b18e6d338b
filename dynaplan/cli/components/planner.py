"""``dynaplan planner``: the planner on its own, its options as flags."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import click

from dynaplan.cli.deployment import join, store_option
from dynaplan.domain.settings.fields import options_of
from dynaplan.domain.settings.planner import PlannerSettings


def _with_options(command: click.Command) -> click.Command:
    for name, each in options_of(PlannerSettings).items():
        if each.kind is bool:
            declared = [f"--{name}/--no-{name}"] if each.default else [f"--{name}"]
            option = click.Option(declared, default=None, is_flag=True, help=each.help)
        else:
            option = click.Option([f"--{name}"], default=None, help=each.help)
        command.params.append(option)
    return command


@click.command(name="planner", short_help="Run the planner on its own.")
@store_option
def command(**options: Any) -> None:
    """Plan for a deployment: the one whose store ETCD_ENDPOINTS names, or the one that runs here.

    With --store nats or file, NATS_SERVER or DYN_FILE_KV names the store.
    """
    from dynaplan.planner.assembly import run_planner
    from dynaplan.runtime.logfile import configure_logging

    settings = PlannerSettings.from_options(options)
    if found := join(settings.namespace):
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


command = _with_options(command)
