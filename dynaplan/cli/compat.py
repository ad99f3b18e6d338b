"""``dynaplan compat COMMAND``: run a program that imports the original's modules."""

from __future__ import annotations

import os

import click


@click.command(
    name="compat",
    short_help="Run a program of the original's API.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND")
def command(words: tuple[str, ...]) -> None:
    """Run COMMAND with the modules dynamo.sdk and dynamo.runtime, which do dynaplan's work.

    For example `dynaplan compat python client.py`.
    """
    from dynaplan.domain.errors import ConfigError
    from dynaplan.sdk.compat import compat_environment

    try:
        os.execvpe(words[0], words, compat_environment(os.environ))
    except OSError as error:
        raise ConfigError(
            f"cannot run {words[0]}: {error.strerror}", hint="As in: dynaplan compat python client.py"
        ) from error
