"""Options that every component started by itself has."""

from __future__ import annotations

from pathlib import Path

import click

config_file_option = click.option("-f", "--config-file", metavar="FILE", help="YAML, as of `dynaplan serve`.")

token_file_option = click.option(
    "--token-file",
    type=click.Path(path_type=Path),
    envvar="DYNAPLAN_TOKEN_FILE",
    help="File with the namespace's token, mode 0600; not needed on one host.",
)

advertise_host_option = click.option(
    "--advertise-host",
    metavar="HOST",
    help="Name or address by which other hosts reach this one; needs the token.  [default: loopback]",
)
