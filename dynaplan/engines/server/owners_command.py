"""A worker that is started by its owner's command: what is checked of it, and its launch line.

The owner's words stand, whatever engine they start (``config/command_words.py``). Of the options of such a
worker only dynaplan's own count: any other would have to go into the command.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

from dynaplan.config.command_words import (
    COMMAND,
    PORT,
    Command,
    engine_command,
    launch_argv,
    read_command,
)
from dynaplan.config.settings.worker import WorkerSettings
from dynaplan.config.stock import OWN_OPTIONS
from dynaplan.engines.server.engine_options import Options
from dynaplan.engines.server.kind import STOP_COMMAND, LaunchLine
from dynaplan.util.errors import ConfigError, nearest

URL = "url"
"""The option with the address at which a command listens, where that is not the leased port."""

KEYS = frozenset({COMMAND, "check", URL, STOP_COMMAND, "model", "served-model-name", *OWN_OPTIONS})
"""The options that a worker with a command has."""


def check_command(options: Options) -> Command:
    """Return the command.

    Raises ConfigError if it cannot be started, or for an option that it does not take.
    """
    WorkerSettings.from_options(options)
    command = read_command(options.get(COMMAND))
    if not command.words:
        raise ConfigError(f"{COMMAND} is {options.get(COMMAND)!r}", hint="Expected the program to start.")
    _check_program(COMMAND, options[COMMAND], command.words[0], "the path of one that may be executed")
    if stop := read_command(options.get(STOP_COMMAND), STOP_COMMAND).words:
        _check_program(
            STOP_COMMAND, options[STOP_COMMAND], stop[0], "leave it out: SIGTERM ends the command then"
        )
    for name in options:
        if name not in KEYS:
            raise ConfigError(
                f"{name} is no option of a command",
                hint=f"Write --{name} into the command, if it has that flag. {nearest(name, KEYS)}",
            )
    return command


def _check_program(option: str, given: object, program: str, instead: str) -> None:
    if shutil.which(os.path.expanduser(program)) is None:
        raise ConfigError(
            f"{option} is {given!r}, but there is no program {program}",
            hint=f"Expected a program on PATH, or {instead}.",
        )


def check_engine_command(options: Options, engine: str) -> None:
    """Raise ConfigError for a command that cannot be started, or that does not start a known engine."""
    check_command(options)
    if engine_command(options) is None:
        raise ConfigError(
            f"engine is {engine!r}, and {COMMAND} is {options[COMMAND]!r}",
            hint="Leave engine out: what is not known to start an engine is run as any command is.",
        )


def engine_line(
    options: Options, port: int, added: Sequence[tuple[str, ...]], environment: Mapping[str, str]
) -> LaunchLine:
    """Return the launch of a known engine by its owner's words.

    ``added`` are flags that are appended where the owner has not set them. ``environment`` is for variables
    that the owner may have set otherwise: his are kept.
    """
    command, found = read_command(options[COMMAND]), engine_command(options)
    assert found is not None, "it was checked"
    words = launch_argv(command, found, ("127.0.0.1", str(port)), added)
    ours = {name: value for name, value in environment.items() if name not in os.environ}
    return LaunchLine(_from_home(words), {**ours, **variables(command, port)})


def command_line(options: Options, port: int) -> LaunchLine:
    """Return the launch of a command of which nothing is known but where its port goes."""
    command = read_command(options[COMMAND])
    words = tuple(word.replace(PORT, str(port)) for word in command.words)
    return LaunchLine(_from_home(words), variables(command, port))


def variables(command: Command, port: int) -> dict[str, str]:
    """Return the variables that the command assigns, and the worker's own in which ``${PORT}`` stands.

    In both the port is put in.
    """
    given = {name: value for name, value in os.environ.items() if PORT in value} | dict(command.environment)
    return {name: value.replace(PORT, str(port)) for name, value in given.items()}


def _from_home(words: tuple[str, ...]) -> tuple[str, ...]:
    return os.path.expanduser(words[0]), *words[1:]
