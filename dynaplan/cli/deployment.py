"""Find the running deployment: the common first step of all commands but ``serve``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    PATHS,
    has_store_address,
    shared_backend,
    store_backend,
)
from dynaplan.util.errors import ConfigError, DeploymentError

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

namespace_option = click.option(
    "--namespace", envvar="DYN_NAMESPACE", default=None, help="The deployment; not needed when only one runs."
)


def _choose_store(ctx: click.Context, parameter: click.Parameter, word: str | None) -> str | None:
    """Have the environment say what ``--store`` says; raises ConfigError for what no deployment can use."""
    is_option = ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    if word:
        backend = shared_backend({BACKEND_VARIABLE: word}, "--store" if is_option else BACKEND_VARIABLE)
        os.environ[BACKEND_VARIABLE] = backend
    return word


store_option = click.option(
    "--store",
    envvar=BACKEND_VARIABLE,
    metavar="STORE",
    expose_value=False,
    callback=_choose_store,
    help="Key-value store: etcd (the default), nats, file, which needs no server, or kubernetes.",
)


def settle_paths() -> None:
    """Make the paths in the environment absolute, for a command that goes to another directory."""
    for name in PATHS:
        if path := os.environ.get(name):
            os.environ[name] = os.path.abspath(os.path.expanduser(path))


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
    from dynaplan.fleet.deployments import find_deployment

    found = find_deployment(namespace)
    os.environ.update(found.environment())
    return found


def join(namespace: str | None) -> RunningDeployment | None:
    """Have the environment say how to reach the deployment's store and servers.

    Where the store is named, the environment does: None. Otherwise the running deployment is found as by
    ``connect``; when there is none, ``--store`` means the store at its usual place: None, too. Raises
    ConfigError when ``--store`` is another store than the deployment's.
    """
    asked = store_backend(os.environ)
    source = click.get_current_context().get_parameter_source("store")
    is_asked = source is ParameterSource.COMMANDLINE
    if has_store_address(os.environ):
        return None
    try:
        found = connect(namespace)
    except DeploymentError:
        if is_asked:
            return None
        raise
    if is_asked and store_backend(os.environ) != asked:
        raise ConfigError(
            f"--store {asked}: {found.namespace}, which runs here, uses {store_backend(os.environ)}",
            hint="Leave --store out.",
        )
    return found
