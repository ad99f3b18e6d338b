"""``dynaplan compat COMMAND``: run a program that imports Dynamo's modules."""

from __future__ import annotations

import os

import click

from dynaplan.util.errors import ConfigError


@click.command(
    name="compat",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND")
def command(words: tuple[str, ...]) -> None:
    """Run COMMAND with the modules dynamo.sdk and dynamo._core, which do dynaplan's work.

    For example `dynaplan compat python client.py`.
    """
    from dynaplan.graph.loading import compat_environment

    try:
        os.execvpe(words[0], words, compat_environment(os.environ))
    except OSError as error:
        raise ConfigError(
            f"cannot run {words[0]}: {error.strerror}", hint="As in: dynaplan compat python client.py"
        ) from error
