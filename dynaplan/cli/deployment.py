"""Find the running deployment: the common first step of all commands but ``serve``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dynaplan.domain.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.supervisor.deployments import RunningDeployment

namespace_option = click.option(
    "--namespace", envvar="DYN_NAMESPACE", default=None, help="The deployment; not needed when only one runs."
)


def namespace_argument(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a command take its namespace as ``--namespace NAME`` or as an argument; ``function`` sees one."""

    @click.argument("name", required=False, metavar="[NAMESPACE]")
    @namespace_option
    @wraps(function)
    def command(name: str | None, namespace: str | None, **others: Any) -> Any:
        is_option = (
            click.get_current_context().get_parameter_source("namespace") is ParameterSource.COMMANDLINE
        )
        if name and is_option and name != namespace:
            raise ConfigError(
                f"{name!r} and --namespace {namespace} are two deployments", hint="Name only one of them."
            )
        return function(namespace=name or namespace, **others)

    return command


@contextmanager
def connected(found: RunningDeployment) -> Iterator[None]:
    """Have the deployment's addresses and tokens in this process's environment, inside a ``with`` block."""
    before = dict(os.environ)
    os.environ.update(found.environment())
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def connect(namespace: str | None) -> RunningDeployment:
    """Return the running deployment, after putting its addresses and tokens into this process's environment.

    Raises DeploymentError when no deployment runs, or several run and none is named.
    """
    from dynaplan.supervisor.deployments import find_deployment

    found = find_deployment(namespace)
    os.environ.update(found.environment())
    return found
