"""A group of commands that are imported on use, so that each starts fast."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

from dynaplan.util.errors import nearest

OWN_PROCESS = "own process"
"""The ``obj`` of the root context where the command line is all that this process does: it may fork."""


class LazyGroup(click.Group):
    """A group by a table: each command in the order of the help page, with its module and its purpose.

    Modules are named below ``dynaplan.cli``; the command is called ``command`` there, or by the name behind a
    colon. ``habits`` are words that users of other tools type, and the command that does the same.
    """

    def __init__(
        self,
        *arguments: Any,
        table: Mapping[str, tuple[str, str]],
        habits: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self._table = table
        self._habits = habits or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of the help page."""
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command's module and return the command."""
        if cmd_name not in self._table:
            return None
        module, _, name = self._table[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(f"dynaplan.cli.{module}"), name or "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands with their purposes, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, purpose) for name, (_, purpose) in self._table.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with; an unknown one is answered with the nearest."""
        name = args[0]
        if name not in self._table and not name.startswith("-"):
            meant = self._habits.get(name.lower())
            hint = f"Did you mean {meant!r}?" if meant else nearest(name, self._table)
            raise click.UsageError(f"No such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)
