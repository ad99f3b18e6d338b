"""Find the running deployment: the common first step of all commands but ``serve``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dynaplan.supervisor.deployments import RunningDeployment

namespace_option = click.option(
    "--namespace", envvar="DYN_NAMESPACE", default=None, help="The deployment; not needed when only one runs."
)


def connect(namespace: str | None) -> RunningDeployment:
    """Return the running deployment, after putting its addresses and tokens into this process's environment.

    Raises DeploymentError when no deployment runs, or several run and none is named.
    """
    from dynaplan.supervisor.deployments import find_deployment

    found = find_deployment(namespace)
    os.environ.update(found.environment())
    return found
