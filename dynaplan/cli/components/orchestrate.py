"""``dynaplan orchestrate``: a planner's decisions, carried out by a command of the user's."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click

from dynaplan.cli.components.shared_options import token_file_option
from dynaplan.cli.deployment import namespace_option, store_option


@click.command(name="orchestrate")
@namespace_option
@store_option
@token_file_option
@click.option(
    "--exec",
    "shell_command",
    required=True,
    metavar="COMMAND",
    help="Run in a shell for each decision: NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS, DECISION_ID are set.",
)
@click.option("--once", is_flag=True, help="End after the first decision that is carried out.")
def command(namespace: str | None, token_file: Path | None, shell_command: str, once: bool) -> None:
    """Carry out the decisions of a planner with `environment: virtual`.

    A decision is acknowledged when the command exits with 0; until then the planner makes no other. A command
    that fails is run again. It should ask for the numbers, not for a difference: it may run twice for one.

    \b
    dynaplan planner --namespace box --environment virtual --policy load &
    dynaplan orchestrate --namespace box \\
      --exec 'kubectl scale deploy/decode --replicas=$NUM_DECODE_WORKERS'
    """
    from dynaplan.cli.components.joining import join
    from dynaplan.process.logfile import configure_logging

    environment = dict(os.environ)  # as it is before joining, which adds the deployment's secrets
    joined = join(namespace, token_file)
    configure_logging()
    asyncio.run(_orchestrate(joined.namespace, shell_command, environment, once))


async def _orchestrate(namespace: str, command: str, environment: dict[str, str], once: bool) -> None:
    from dynaplan.planner.virtual.client import VirtualConnectorClient
    from dynaplan.planner.virtual.orchestrator import Orchestrator
    from dynaplan.process.signals import on_signals
    from dynaplan.runtime import connect

    async with connect(namespace) as runtime:
        orchestrator = Orchestrator(VirtualConnectorClient(runtime), command, environment)
        work = asyncio.ensure_future(orchestrator.carry_out_next() if once else orchestrator.run())

        def leave(name: str) -> None:
            click.echo(f"{name}: ending the command that runs")
            work.cancel()

        with on_signals(leave):
            try:
                await work
            except asyncio.CancelledError:
                click.echo("stopped")
