"""Progress on standard error: one line that changes on a terminal, now and then a line of its own elsewhere.

Standard output stays what it is, so that JSON and tables can be piped.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from io import TextIOBase
from typing import TextIO

from dynaplan.util.durations import clock

EVERY_S = 30.0
"""Seconds between two lines that say nothing new, where there is no terminal."""

REDRAW_S = 0.1
"""Least seconds between two drawings of the line on a terminal."""

CLEAR = "\r\x1b[K"
"""Goes to the beginning of the line, and erases it."""


class ProgressLine:
    """The line; as a context manager it is erased at the end, so that nothing of it stays on a terminal."""

    def __init__(
        self,
        stream: TextIO | TextIOBase | None = None,
        every_s: float = EVERY_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._every_s = every_s
        self._now_s = now_s
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._written_s = now_s() if every_s else float("-inf")
        self._drawn_s = float("-inf")
        self._news: str | None = None

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.erase()

    def show(self, text: str, news: str | None = None) -> None:
        """Draw the text over the last one on a terminal, at most every ``REDRAW_S`` seconds.

        Elsewhere write it as a line when ``news`` has changed, and ``every_s`` seconds after the last line;
        with ``news`` None only then.
        """
        now_s = self._now_s()
        is_news = news is not None and news != self._news
        self._news = news if news is not None else self._news
        if self._is_terminal:
            if is_news or now_s - self._drawn_s >= REDRAW_S:
                self._drawn_s = now_s
                self._write(CLEAR + text[: shutil.get_terminal_size().columns - 1])
        elif is_news or now_s - self._written_s >= self._every_s:
            self._written_s = now_s
            self._write(f"{text}\n")

    def erase(self) -> None:
        """Erase the line on a terminal; do it before anything else is written there."""
        if self._is_terminal:
            self._write(CLEAR)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # its reader went away, or it was closed: nobody looks
            self._is_terminal = False
            self._every_s = float("inf")


def time_left_s(done: float, total: float, passed_s: float) -> float | None:
    """Return the seconds left at the pace until now; None before there is a pace."""
    if done <= 0 or passed_s <= 0:
        return None
    return max(0.0, (total - done) / done * passed_s)


def left_words(left_s: float | None) -> str:
    """Return ``about 01:23 left``; empty when it is not known."""
    return "" if left_s is None else f"about {clock(left_s)} left"
