"""``dynaplan stop``: end the running deployment as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import time

import click

from dynaplan.cli.options import namespace_argument
from dynaplan.cli.timing import EXIT_POLL_S, SIGNAL_GAP_S
from dynaplan.process import process_table
from dynaplan.util.errors import TemporaryError


@click.command(name="stop")
@namespace_argument
@click.option("--now", is_flag=True, help="Do not let requests finish.")
@click.option(
    "--timeout", type=click.FloatRange(0.0), default=90.0, show_default=True, help="Seconds to wait."
)
def command(namespace: str | None, now: bool, timeout: float) -> None:
    """Let requests finish, end every process, remove the statefile."""
    from dynaplan.fleet.deployments import find_deployment

    found = find_deployment(namespace)
    processes = process_table
    os.kill(found.arbiter.pid, signal.SIGTERM)
    if now:
        time.sleep(SIGNAL_GAP_S)
        if processes.is_alive(found.arbiter):
            os.kill(found.arbiter.pid, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout
    while processes.is_alive(found.arbiter):
        if time.monotonic() > deadline_s:
            raise TemporaryError(
                f"{found.namespace} has not ended within {timeout:g} s",
                hint="`dynaplan stop --now` ends it at once.",
            )
        time.sleep(EXIT_POLL_S)
    click.echo(f"{found.namespace} has ended")
