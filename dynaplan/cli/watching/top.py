"""``dynaplan top``: the deployment, live, with keys that call the other commands."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

import click

from dynaplan.cli.deployment import namespace_argument, store_option
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.cli.watching.following import Following


@click.command(name="top")
@namespace_argument
@store_option
def command(namespace: str | None) -> None:
    """Show the deployment live: load against targets, workers, GPUs, the last decision.

    The keys are shown at the bottom, and `?` explains them. `dynaplan status --watch` shows the same without
    keys.
    """
    from dynaplan.cli.watching.following import Following

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "top needs a terminal", hint="`dynaplan status --watch` and `--json` write to anything."
        )
    following = Following(namespace)
    asyncio.run(_run(following))


async def _run(following: Following) -> None:
    """Show the deployment until `q`; the terminal is as it was afterwards."""
    import curses

    from dynaplan.cli.watching import painting
    from dynaplan.cli.watching.live_screen import LiveScreen
    from dynaplan.fleet.deployments import tail
    from dynaplan.util.screen import colours_wanted
    from dynaplan.webui.commands import called

    try:
        window = curses.initscr()
    except curses.error as error:
        raise ConfigError(f"top: {error}", hint="Set TERM, or use `dynaplan status --watch`.") from None
    try:
        curses.noecho()
        curses.cbreak()
        window.keypad(True)
        window.nodelay(True)
        painting.begin(colours_wanted() is not False)
        await LiveScreen(
            window,
            following.look,
            called,
            lambda worker, lines: list(tail(following.found.log_dir / f"{worker}.log", lines)),
        ).run()
    finally:
        curses.endwin()
        await following.close()
