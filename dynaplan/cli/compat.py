"""``dynaplan compat COMMAND``: run a program that imports Dynamo's modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from dynaplan.util.errors import ConfigError


@click.command(
    name="compat",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND")
def command(words: tuple[str, ...]) -> None:
    """Run COMMAND with the modules dynamo.sdk and dynamo._core, which do dynaplan's work.

    For example `dynaplan compat client.py`: a Python program runs in the environment of dynaplan.
    """
    from dynaplan.graph.loading import compat_environment

    program, *arguments = _with_interpreter(words)
    try:
        os.execvpe(program, [program, *arguments], compat_environment(os.environ))
    except OSError as error:
        raise ConfigError(
            f"cannot run {program}: {error.strerror}", hint="As in: dynaplan compat python client.py"
        ) from error


def _with_interpreter(words: Sequence[str]) -> Sequence[str]:
    """Return the command with this interpreter in the place of ``python``, or before a ``.py`` file."""
    if words[0] in ("python", "python3"):
        return [sys.executable, *words[1:]]
    return [sys.executable, *words] if words[0].endswith(".py") and Path(words[0]).is_file() else words
