"""Options that several commands have, each declared once.

Some go into the environment of this process, where its children and the modules below read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    COMPAT_VARIABLE,
    HOST_VARIABLE,
    TLS_OPTIONS,
    TLS_VARIABLES,
    shared_backend,
)
from dynaplan.util.errors import ConfigError

Command = TypeVar("Command", bound=Callable[..., object])

namespace_option = click.option(
    "--namespace", envvar="DYN_NAMESPACE", default=None, help="The deployment; not needed when only one runs."
)


class GpuNumber(click.IntRange):
    """A number of GPUs; ``all`` is as many as there are, as without the option."""

    def __init__(self) -> None:
        super().__init__(0, 1024)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "all":
            return None
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            words = f"{value!r}: expected a number of GPUs, or all."
            if re.fullmatch(r"\d+(,\d+)+", str(value)):
                count = str(value).count(",") + 1
                words += f" Which ones: CUDA_VISIBLE_DEVICES={value} dynaplan serve ... --gpus {count}"
            self.fail(words, param, ctx)


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


def _choose_store(ctx: click.Context, parameter: click.Parameter, word: str | None) -> str | None:
    """Put ``--store`` into the environment; raises ConfigError for a store that no deployment can use."""
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

join_option = click.option("--namespace", envvar="DYN_NAMESPACE", default=None, help="The namespace to join.")

json_option = click.option("--json", "as_json", is_flag=True, help="For programs.")

api_key_option = click.option(
    "--api-key",
    envvar="DYNAPLAN_API_KEY",
    default="",
    help="Ask for this key; better as the variable DYNAPLAN_API_KEY.",
)

step_timeout_option = click.option(
    "--timeout", type=click.FloatRange(0.0), help="Seconds that each start or drain may take."
)


def config_file_option(
    help: str = "YAML, as of `dynaplan serve`.", **more: Any
) -> Callable[[Command], Command]:
    """Return the option for a configuration's file, which every command has under the same names."""
    return click.option("-f", "--config-file", "--config", "config_file", metavar="FILE", help=help, **more)


token_file_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="DYNAPLAN_TOKEN_FILE",
    help="File with the namespace's token, mode 0600; not needed on one host.",
)

compat_option = click.option(
    "--compat",
    envvar=COMPAT_VARIABLE,
    metavar="API",
    expose_value=False,
    callback=lambda ctx, parameter, name: name and os.environ.update({COMPAT_VARIABLE: name}),
    help="Let graphs import another system's modules: dynamo, for `from dynamo.sdk import ...`.",
)

advertise_host_option = click.option(
    "--advertise-host",
    metavar="HOST",
    envvar=HOST_VARIABLE,
    help="Name or address by which other hosts reach this one; needs the token.  [default: loopback]",
)

advertise_port_option = click.option(
    "--advertise-port",
    type=click.IntRange(0, 65535),
    envvar="DYNAPLAN_ADVERTISE_PORT",
    default=0,
    help="Port there; 0, the default, takes a free one.",
)


def tls_option(name: str) -> Callable[[Command], Command]:
    """Return the option for a file of TLS, which goes into the environment of all processes."""

    def keep(ctx: click.Context, parameter: click.Parameter, path: str | None) -> None:
        if path:
            os.environ[TLS_VARIABLES[name]] = os.path.abspath(os.path.expanduser(path))

    return click.option(
        f"--{name}",
        metavar="FILE",
        envvar=TLS_VARIABLES[name],
        expose_value=False,
        callback=keep,
        help=TLS_OPTIONS[name].help,
    )


def reachable_options(command: Command) -> Command:
    """Give a component's command the options by which other hosts reach it: token, address and TLS."""
    for option in (tls_options, advertise_port_option, advertise_host_option, token_file_option):
        command = option(command)
    return command


def tls_options(command: Command) -> Command:
    for name in reversed(list(TLS_OPTIONS)):
        command = tls_option(name)(command)
    return command
