"""``dynaplan ui``: print the address of the deployment's web page."""

from __future__ import annotations

import os

import click

from dynaplan.cli.options import namespace_argument
from dynaplan.cli.running_deployment import connect
from dynaplan.contract.page_access import page_url
from dynaplan.util.errors import DeploymentError


@click.command(name="ui")
@namespace_argument
def command(namespace: str | None) -> None:
    """Print the address of the web page, which signs a browser in.

    It holds a token, with which one can scale and drain this deployment, and send prompts. Over ssh, forward
    the port: `ssh -L 8000:localhost:8000 HOST`, and open the address on your side.
    """
    found = connect(namespace)
    secret = os.environ.get("DYNAPLAN_WORKER_TOKEN")
    if not secret:
        raise DeploymentError(f"{found.namespace} has no token", hint="Only `dynaplan serve` has the page.")
    click.echo(page_url(found.frontend_url, secret))
