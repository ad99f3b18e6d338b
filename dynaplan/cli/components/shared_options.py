"""Options that every component started by itself has; ``serve`` and the planner have some of them, too."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from dynaplan.config.settings.servers import COMPAT_VARIABLE, HOST_VARIABLE, TLS_OPTIONS, TLS_VARIABLES

Command = TypeVar("Command", bound=Callable[..., object])

config_file_option = click.option("-f", "--config-file", metavar="FILE", help="YAML, as of `dynaplan serve`.")

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


def tls_options(command: Command) -> Command:
    """Give a command the options for all files of TLS."""
    for name in reversed(list(TLS_OPTIONS)):
        command = tls_option(name)(command)
    return command
