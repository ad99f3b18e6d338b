"""A command on a terminal of 100 columns, and its screen drawn as SVG (pyte is the terminal)."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.e2e.deployment import Deployment, dynaplan

COLUMNS, LINES = 100, 32
RATES_S, KEYS_S = 15.0, 2.0
"""Seconds until a live command has counted requests twice, and until it has heeded a key."""

CELL, ROW, MARGIN = 8.4, 18, 14
"""Pixels: the width of a character of 14 px, the height of a line, what is left free around them."""

INK, PAPER, QUIET = "#e6edf3", "#0d1117", "#8b949e"
COLOURS = {"red": "#ff7b72", "green": "#7ee787", "brown": "#e3b341"}
"""pyte's names of the colours that commands use; it calls yellow brown, as terminals once did."""


class Terminal:
    """The command runs inside a ``with`` block; Ctrl-C ends it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        import pyte

        self._screen: Any = pyte.Screen(COLUMNS, LINES)
        self._stream: Any = pyte.ByteStream(self._screen)
        self._reader, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        own = {
            key: value for key, value in environment.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self._process = subprocess.Popen(
            command,
            env={**own, "TERM": "linux"},
            cwd=directory,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._reader, b"\x03q")
        self.look(10.0)
        self._process.kill()
        self._process.wait()
        os.close(self._reader)

    @property
    def pid(self) -> int:
        return self._process.pid

    def type(self, keys: str) -> None:
        os.write(self._reader, keys.encode())

    def look(self, for_s: float) -> None:
        """Take in what is shown for so long, or until the command has ended."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([self._reader], [], [], left_s)[0]:
                try:
                    self._stream.feed(os.read(self._reader, 65536))
                except OSError:  # EIO: the command has ended
                    return

    def rows(self) -> list[list[Any]]:
        """Return the cells of each line, without the empty lines at the end."""
        rows = [[self._screen.buffer[row][column] for column in range(COLUMNS)] for row in range(LINES)]
        while rows and not "".join(cell.data for cell in rows[-1]).strip():
            rows.pop()
        return rows

    def svg(self, title: str, home: str) -> str:
        """Return the screen as a picture, below the line that was typed; the home directory is ``~``."""
        rows = self.rows()
        width, height = COLUMNS * CELL + 2 * MARGIN, (len(rows) + 2) * ROW + 2 * MARGIN
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" role="img" aria-label="{escape(title)}" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14">',
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            _text(0, 0, title, QUIET, is_bold=False),
        ]
        for number, row in enumerate(rows, 2):
            lines += [each.replace(home, "~") for each in _drawn(row, number)]
        return "\n".join([*lines, "</svg>\n"])


def _drawn(row: Sequence[Any], number: int) -> Iterator[str]:
    """Yield the pieces of a line, each of cells that look alike."""
    column = 0
    for (colour, is_bold, is_reverse), cells in groupby(row, lambda cell: (cell.fg, cell.bold, cell.reverse)):
        text = "".join(cell.data for cell in cells)
        ink = COLOURS.get(colour, INK)
        if is_reverse:
            place = f'x="{MARGIN + column * CELL:g}" y="{MARGIN + number * ROW:g}"'
            yield f'<rect {place} width="{len(text) * CELL:g}" height="{ROW}" fill="{ink}"/>'
            ink = PAPER
        if text.strip():
            yield _text(column, number, text, ink, is_bold=is_bold)
        column += len(text)


def _text(column: int, number: int, text: str, ink: str, *, is_bold: bool) -> str:
    """Return a piece of text at its cell, as wide as its cells whatever the font."""
    column += len(text) - len(text.lstrip())
    text = text.strip()
    place = f'x="{MARGIN + column * CELL:g}" y="{MARGIN + number * ROW + 14:g}"'
    weight = ' font-weight="bold"' if is_bold else ""
    return (
        f'<text {place} textLength="{len(text) * CELL:g}" lengthAdjust="spacingAndGlyphs" '
        f'xml:space="preserve" fill="{ink}"{weight}>{escape(text)}</text>'
    )


def drawn(deployment: Deployment, words: tuple[str, ...], path: Path) -> None:
    """Draw what the command shows on a terminal: at its end, or when it has been live for some seconds."""
    with Terminal([dynaplan(), *words], deployment.environment, deployment.directory) as terminal:
        terminal.look(RATES_S if words[0] != "why" else 60.0)
        if words == ("top",):
            terminal.type("jjj")
            terminal.look(KEYS_S)
        path.write_text(terminal.svg(f"$ dynaplan {' '.join(words)}", str(deployment.directory)))
