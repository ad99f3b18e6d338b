"""Draws lines with their colours on a terminal through curses, which sends only what has changed."""

from __future__ import annotations

import curses
import re
from collections.abc import Iterator, Sequence

_SGR = re.compile(r"\x1b\[([\d;]*)m")
_COLOURS = {31: curses.COLOR_RED, 32: curses.COLOR_GREEN, 33: curses.COLOR_YELLOW}
"""The codes that ``click.style`` writes for the colours of ``util/screen.py``."""


def begin(is_coloured: bool) -> None:
    """Choose the pairs of colours, after curses has begun; a terminal without colours stays as it is."""
    curses.curs_set(0)
    if is_coloured and curses.has_colors():
        curses.start_color()
        curses.use_default_colors()
        for code, colour in _COLOURS.items():
            curses.init_pair(code, colour, -1)


def paint(window: curses.window, lines: Sequence[str], marked: int | None = None) -> None:
    """Draw the lines from the top on, as far as they fit; the ``marked`` one is shown in reverse."""
    height, width = window.getmaxyx()
    window.erase()
    for number, line in enumerate(lines[:height]):
        plain = curses.A_REVERSE if number == marked else curses.A_NORMAL
        column = 0
        for text, attributes in spans(line):
            # The last cell of the last line cannot be written: curses would move behind it.
            room = width - column - (number == height - 1)
            if room <= 0:
                break
            window.addnstr(number, column, text, room, attributes | plain)
            column += len(text)
        if number == marked and column < width - 1:
            window.addnstr(number, column, " " * (width - column - 1), width - column - 1, plain)
    window.refresh()


def spans(line: str) -> Iterator[tuple[str, int]]:
    """Yield the texts of a line with their attributes; colours are those of ``click.style``."""
    attributes = curses.A_NORMAL
    pieces = _SGR.split(line)
    for place, piece in enumerate(pieces):
        if place % 2 == 0:
            if piece:
                yield piece, attributes
            continue
        for code in map(int, filter(None, (piece or "0").split(";"))):
            attributes = _attributes(attributes, code)


def _attributes(before: int, code: int) -> int:
    if code in _COLOURS:
        return before | _pair(code)
    return before | curses.A_BOLD if code == 1 else curses.A_NORMAL


def _pair(code: int) -> int:
    try:
        return curses.color_pair(code)
    except curses.error:  # the terminal has none, or curses has not begun
        return curses.A_NORMAL
