"""The options of a service's section as flags of a command: ``--max-model-len 4096``, not ``--X.y=z``.

They are the ones of ``--Service.key=value``, so that what ``config/settings`` declares once is here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import click

from dynaplan.cli.overriding import OverridingCommand
from dynaplan.config.overrides import NEGATIVE, typed_value
from dynaplan.config.settings.fields import Options, kebab
from dynaplan.util.errors import nearest


@dataclass
class Flags:
    """The flags of one command line: key -> value.

    ``others`` are unknown to the section, as an engine's own would be.
    """

    known: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


class ComponentCommand(OverridingCommand):
    """Takes the options of ``table`` as flags into ``ctx.meta[FLAGS]`` before click sees the rest.

    ``listed`` are the ones that the help page shows, under ``heading``; ``aliases`` are other names of keys.
    """

    def __init__(
        self,
        *arguments: Any,
        table: Options,
        listed: Options,
        heading: str,
        aliases: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(*arguments, **more)
        self._table = table
        self._listed = listed
        self._heading = heading
        self.aliases = aliases or {}

    @property
    def flags(self) -> list[str]:
        """Every flag with its dashes: the command's own, aliases and the section's."""
        own = [name for each in self.params for name in each.opts if name.startswith("--")]
        return [*own, *(f"--{name}" for name in (*self.aliases, *self._table))]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the section's flags off, then parse as usual."""
        own = {name for each in self.get_params(ctx) for name in (*each.opts, *each.secondary_opts)}
        flags, rest = self._split(list(args), own)
        ctx.meta[FLAGS] = flags
        return super().parse_args(ctx, rest)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options, and below them the section's."""
        super().format_options(ctx, formatter)
        with formatter.section(self._heading):
            formatter.write_dl([(f"--{name}", each.help) for name, each in self._listed.items()])

    def _split(self, waiting: list[str], own: set[str]) -> tuple[Flags, list[str]]:
        flags, rest = Flags(), []
        while waiting:
            token = waiting.pop(0)
            name, is_given, text = token.partition("=")
            if token == "--" or not token.startswith("--") or name in own or "." in name:
                rest.append(token)
            else:
                key = kebab(name.removeprefix("--"))
                self._take(flags, self.aliases.get(key, key), text if is_given else None, waiting)
        return flags, rest

    def _take(self, flags: Flags, key: str, text: str | None, waiting: list[str]) -> None:
        """Enter one flag, with the word after it where it needs one."""
        option = self._table.get(key)
        denied = self._table.get(key.removeprefix("no-"))
        if option is None and denied is not None and denied.kind is bool and text is None:
            flags.known[key.removeprefix("no-")] = False
            return
        if text is None and not (option and option.kind is bool) and waiting and _is_value(waiting[0]):
            text = waiting.pop(0)
        taken = flags.others if option is None else flags.known
        if text is None:
            taken[key] = True
        else:
            taken[key] = text if option and option.kind is str else typed_value(["", key], text)


FLAGS = "dynaplan.flags"
"""The key of ``ctx.meta`` that holds the ``Flags``."""


def known_flags(ctx: click.Context) -> dict[str, Any]:
    """Return the section's flags; raise the usage error of the first one that nobody knows."""
    flags: Flags = ctx.meta[FLAGS]
    for name in flags.others:
        meant = nearest(f"--{name}", getattr(ctx.command, "flags", ()))
        hint = meant if meant.startswith("Did") else "`--help` lists the options."
        raise click.UsageError(f"No such option '--{name}'. {hint}", ctx)
    return flags.known


def _is_value(word: str) -> bool:
    return not word.startswith("-") or NEGATIVE.match(word) is not None
