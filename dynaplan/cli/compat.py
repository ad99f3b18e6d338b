"""``dynaplan compat COMMAND``: run a program that imports the original's modules, or is one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click

from dynaplan.util.errors import ConfigError


@dataclass(frozen=True)
class OriginalCommand:
    """A module of the original that is run by ``python -m``: the command of dynaplan that does its work.

    ``renamed`` are flags of it that have another name here; ``expanded`` flags that stand for other words;
    ``refused`` flags that have no counterpart. Every other word is taken as it is.
    """

    command: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)
    expanded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()

    def words(self, arguments: Sequence[str]) -> list[str]:
        """Return dynaplan's command line; raises ConfigError for a flag without counterpart."""
        words = list(self.command)
        for argument in arguments:
            flag, is_given, value = argument.partition("=")
            if flag in self.refused:
                raise ConfigError(f"{flag} of the original has no counterpart here", hint="Leave it out.")
            if argument in self.expanded:
                words += self.expanded[argument]
            else:
                words.append(self.renamed.get(flag, flag) + is_given + value)
        return words


ORIGINAL_COMMANDS: Mapping[str, OriginalCommand] = {
    "dynamo.frontend": OriginalCommand(
        ("frontend",),
        renamed={
            "--http-port": "--port",
            "--http-host": "--host",
            "--tls-cert-path": "--tls-cert",
            "--tls-key-path": "--tls-key",
        },
    ),
    "dynamo.vllm": OriginalCommand(
        ("worker", "--engine", "vllm"),
        expanded={"--is-prefill-worker": ("--role", "prefill"), "--is-decode-worker": ("--role", "decode")},
        refused=frozenset({"--endpoint", "--connector", "--migration-limit", "--custom-jinja-template"}),
    ),
}
"""Module -> what runs in its place."""


def run_original(module: str) -> None:
    """Run dynaplan's command in place of ``python -m MODULE``, with this process's arguments, and exit."""
    from dynaplan.cli.main import main

    try:
        words = ORIGINAL_COMMANDS[module].words(sys.argv[1:])
    except ConfigError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    main(words)


@click.command(
    name="compat",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND")
def command(words: tuple[str, ...]) -> None:
    """Run COMMAND with the modules dynamo.sdk, dynamo.runtime, dynamo.frontend and dynamo.vllm.

    They do dynaplan's work. For example `dynaplan compat python client.py`.
    """
    from dynaplan.graph.loading import compat_environment

    try:
        os.execvpe(words[0], words, compat_environment(os.environ))
    except OSError as error:
        raise ConfigError(
            f"cannot run {words[0]}: {error.strerror}", hint="As in: dynaplan compat python client.py"
        ) from error
