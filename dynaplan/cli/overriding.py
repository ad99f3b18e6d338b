"""Commands that take ``--Service.key=value`` beside their own options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from dynaplan.domain.errors import ConfigError


class OverridingCommand(click.Command):
    """Takes ``--Service.key=value`` out of the arguments into ``obj`` before click sees the rest.

    Everything else that click does not know stays an error: a misspelt option must not become an override.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Split the overrides off, then parse as usual."""
        from dynaplan.options.overrides import split_overrides

        overrides, rest = split_overrides(args)
        ctx.obj = list(overrides)
        return super().parse_args(ctx, list(rest))


def sections_of(arguments: Sequence[str], known: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``--Section.key=value`` by section, values read as YAML; ConfigError for an unknown section."""
    from dynaplan.options.overrides import parse_overrides

    sections: dict[str, dict[str, Any]] = {name: {} for name in known}
    for service, section in parse_overrides(arguments).items():
        if service not in sections:
            raise ConfigError(f"--{service}.…: unknown section", hint=f"expected {' or '.join(sections)}")
        sections[service] |= section
    return sections
