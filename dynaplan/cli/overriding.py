"""Commands that take ``--Service.key=value`` beside their own options."""

from __future__ import annotations

import click


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
