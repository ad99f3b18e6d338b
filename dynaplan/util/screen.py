"""The reader's screen: its width and its colours. A pipe has neither.

click drops colours where the output is no terminal; ``colours_wanted`` adds the user's own wish.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import click

GOOD, BUSY, BAD = "green", "yellow", "red"

COLOURS: Mapping[str, str] = {
    "ready": GOOD,
    "loading": BUSY,
    "starting": BUSY,
    "waiting": BUSY,
    "draining": BUSY,
    "stopping": BUSY,
    "backoff": BUSY,
    "asleep": BUSY,
    "failed": BAD,
    "dead": BAD,
}
"""The colours of the states of a worker, by the first word of what is shown."""

HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
"""Sequences of a terminal: to the upper left, erase to the line's end, erase to the screen's end."""


class Note(str):
    """A line among warnings that tells what is done: nothing is to be mended."""

    __slots__ = ()


def width() -> int:
    """Return the columns of the terminal that standard output is; 0 for a pipe or a file: no limit."""
    import shutil  # it costs as much as the rest of the help page

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def repaint(text: str) -> None:
    """Write a page over the last one on a terminal; elsewhere below it, with an empty line between."""
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        click.echo(f"{text}\n")
        return
    import shutil

    height = shutil.get_terminal_size().lines - 1
    lines = (f"{line}{ERASE_LINE}" for line in text.split("\n")[:height])
    click.echo(HOME + "\n".join(lines) + f"\n{ERASE_BELOW}", nl=False)


def colours_wanted(environ: Mapping[str, str] = os.environ) -> bool | None:
    """Return False when the user or the terminal wants no colours, else None: where there is a terminal."""
    return False if environ.get("NO_COLOR") or environ.get("TERM") == "dumb" else None


def state_coloured(text: str) -> str:
    """Colour the state of a worker, ``loading 00:23`` by its first word; an unknown one stays plain."""
    colour = COLOURS.get(text.split(" ", 1)[0])
    return click.style(text, fg=colour) if colour else text


def good(text: str) -> str:
    """Colour a text about something that went well."""
    return click.style(text, fg=GOOD)


def warning(text: str) -> str:
    """Colour a text that a reader should not pass over."""
    return click.style(text, fg=BUSY)


def error(text: str) -> str:
    """Colour a text about something that went wrong."""
    return click.style(text, fg=BAD, bold=True)
