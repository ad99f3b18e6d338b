"""``dynaplan top``: the deployment, live, with keys that call the other commands.

Keys do nothing of their own: they run the commands that a user would type, and show what those print. The
screen is drawn through curses, which sends only what has changed.
"""

from __future__ import annotations

import asyncio
import curses
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import click

from dynaplan.cli.options import namespace_argument, store_option
from dynaplan.cli.status_poller import StatusPoller
from dynaplan.cli.status_view import (
    View,
    render_decision,
    render_gpus,
    render_keys,
    render_lines,
    render_models,
    render_workers,
    view_of,
)
from dynaplan.cli.timing import SCREEN_POLL_S
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.fleet.deployments import tail
from dynaplan.util.errors import ConfigError
from dynaplan.util.screen import colours_wanted
from dynaplan.util.tables import fold
from dynaplan.webui.actions import command_arguments, run_command


@click.command(name="top")
@namespace_argument
@store_option
def command(namespace: str | None) -> None:
    """Show the deployment live: load against targets, workers, GPUs, the last decision.

    The keys are shown at the bottom, and `?` explains them. `dynaplan status --watch` shows the same without
    keys.
    """

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "top needs a terminal", hint="`dynaplan status --watch` and `--json` write to anything."
        )
    check_terminal()
    poller = StatusPoller(namespace)
    asyncio.run(_run(poller))


def check_terminal() -> None:
    """Raise ConfigError for a terminal, as TERM names it, on which no text can be placed."""
    try:
        curses.setupterm()
        can_place = curses.tigetstr("cup")
    except curses.error:
        can_place = None
    if not can_place:
        raise ConfigError(
            f"top needs a terminal with a cursor that can be moved; TERM is {os.environ.get('TERM', '')!r}",
            hint="`dynaplan status --watch` writes to any; in most windows TERM=xterm-256color is right.",
        )


async def _run(poller: StatusPoller) -> None:
    """Show the deployment until `q`; the terminal is as it was afterwards."""

    window = curses.initscr()
    try:
        curses.noecho()
        curses.cbreak()
        window.keypad(True)
        window.nodelay(True)
        init_colours(colours_wanted() is not False)
        await LiveScreen(
            window,
            poller.poll,
            run_command,
            lambda worker, lines: list(tail(poller.found.log_dir / f"{worker}.log", lines)),
        ).run()
    finally:
        curses.endwin()
        await poller.close()


LOG_LINES = 500
"""Lines of a log that can be scrolled through."""

KEYS = "arrows  l log  +- scale  h hold  d drain  r restart  w why  ? help  q quit"

HELP = """Keys
  up, down, j, k      choose a worker, or a model that is loaded on request
  l                   its log, followed; up, down and the page keys scroll
  + and -             one worker more, or one less, of its role (`dynaplan scale`)
  h                   hold the number of its role, or release it (`dynaplan scale --hold`, `release`)
  d                   drain this worker: one less of its role, and this one leaves, after its requests
  r                   restart this worker: a new one first, then this one leaves (`dynaplan restart`)
                      of a model: + loads it, - and d unload it, h pins it or lets it leave again
  w                   the planner's last decisions and their reasons (`dynaplan why`)
  escape, q           back to the workers, or quit; Ctrl-C ends top from anywhere

TTFT and ITL are the mean and a percentile of the last minute, read off the frontends' histograms.
KV is the part of the KV cache in use."""

UP, DOWN = (curses.KEY_UP, ord("k")), (curses.KEY_DOWN, ord("j"))
ESCAPE = 27


class LiveScreen:
    """One terminal. ``poll`` returns the document, ``call`` runs a command and returns what it wrote.

    ``log`` returns the last lines of a worker's log. ``keyboard`` is the descriptor that keys are read from.
    """

    def __init__(
        self,
        window: curses.window,
        poll: Callable[[], Awaitable[dict[str, Any]]],
        call: Callable[[Sequence[str]], Awaitable[str]],
        log: Callable[[str, int], Sequence[str]],
        keyboard: int = 0,
    ) -> None:
        self._window = window
        self._keyboard = keyboard
        self._poll = poll
        self._call = call
        self._log = log
        self._document: dict[str, Any] | None = None
        self._chosen = ""
        self._shown_log = ""
        self._text: list[str] | None = None
        self._scroll = 0
        self._question: tuple[str, list[str]] | None = None
        self._message = "looking ..."
        self._calls: set[asyncio.Task[None]] = set()
        self._is_over = False
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Poll, draw and handle keys until `q`. Raises DeploymentError when the deployment ends."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._keyboard, self._take_keys)
        try:
            self._draw()
            while not self._is_over:
                self._document = await self._poll()
                self._message = "" if self._message == "looking ..." else self._message
                self._take_keys()
                self._draw()
                await self._pause()
        finally:
            loop.remove_reader(self._keyboard)
            for task in self._calls:
                task.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)

    async def _pause(self) -> None:
        self._wake.clear()
        try:
            async with asyncio.timeout(SCREEN_POLL_S):
                await self._wake.wait()
        except TimeoutError:
            pass

    # -- keys ------------------------------------------------------------------------------------

    def _take_keys(self) -> None:
        while (key := self._window.getch()) != -1:
            if key == curses.KEY_RESIZE:
                curses.update_lines_cols()
            elif self._question:
                self._answer(key)
            elif self._text is not None or self._shown_log:
                self._scroll_or_leave(key)
            else:
                self._press(key)
        if not self._is_over:
            self._draw()

    def _answer(self, key: int) -> None:
        _, arguments = self._question or ("", [])
        self._question = None
        if key in (ord("y"), ord("Y")):
            self._start_command(arguments)

    def _scroll_or_leave(self, key: int) -> None:
        rows = self._window.getmaxyx()[0] - 2
        steps = {
            **dict.fromkeys(UP, -1),
            **dict.fromkeys(DOWN, 1),
            curses.KEY_PPAGE: -rows,
            curses.KEY_NPAGE: rows,
            ord(" "): rows,
            curses.KEY_HOME: -(10**6),
            curses.KEY_END: 10**6,
        }
        if key in (ord("q"), ESCAPE):
            self._text, self._shown_log, self._scroll = None, "", 0
        elif key in steps:
            self._scroll += steps[key]

    def _press(self, key: int) -> None:
        self._message = ""
        if key in UP or key in DOWN:
            self._choose(-1 if key in UP else 1)
        elif key == ord("q"):
            self._is_over = True
            self._wake.set()
        elif key == ord("?"):
            self._show(HELP)
        elif key == ord("w"):
            self._start_command(["why"], is_page=True)
        elif key == ord("l") and self._chosen_row():
            self._shown_log, self._scroll = self._chosen, 10**6
        elif 0 <= key < 128 and chr(key) in "+-hdr":
            self._act(chr(key))

    def _choose(self, step: int) -> None:
        if names := [*main_page(view_of(self._document, time.time()), 0)[1]] if self._document else []:
            place = names.index(self._chosen) + step if self._chosen in names else 0
            self._chosen = names[min(max(place, 0), len(names) - 1)]

    def _act(self, key: str) -> None:
        """Run the command of that key on the chosen worker, or ask first where it ends something."""
        if model := self._chosen_model():
            self._act_on_model(key, model)
            return
        row = self._chosen_row()
        role = row["role"] if row else ""
        if row is None or role not in {each.value for each in SCALED_ROLES}:
            self._message = "choose a decode or prefill worker first (up, down)"
            return
        is_held = self._document is not None and role in self._document["holds"]
        do = {"h": "release" if is_held else "hold", "d": "drain", "r": "restart"}.get(key, "scale")
        action = {"do": do, "role": role, "worker": self._chosen, "by": -1 if key == "-" else 1}
        arguments = command_arguments(action)
        if key == "d":
            self._question = f"Drain {self._chosen}, one {role} worker less? y/n", arguments
        elif key == "r":
            self._question = f"Restart {self._chosen}? y/n", arguments
        else:
            self._start_command(arguments)

    def _act_on_model(self, key: str, name: str) -> None:
        """Run the command of that key on a model that is loaded on request."""
        if key == "+":
            self._start_command(["load", "--no-wait", name])
        elif key == "h" and self._on_request()[name]["is_pinned"]:
            self._start_command(["unpin", name])
        elif key == "h":
            self._start_command(["pin", "--no-wait", name])
        elif key == "r":
            self._message = "choose a worker first (up, down)"
        else:
            self._question = f"Unload {name}? y/n", ["unload", "--no-wait", name]

    def _on_request(self) -> dict[str, Any]:
        return self._document.get("on_request", {}) if self._document else {}

    def _chosen_model(self) -> str:
        """Return the chosen model that is loaded on request; empty where a worker is chosen."""
        name = self._chosen.removeprefix(MODEL_CHOICE)
        return name if name != self._chosen and name in self._on_request() else ""

    def _chosen_row(self) -> dict[str, Any] | None:
        rows = self._document["workers"] if self._document else []
        return next((row for row in rows if row["worker"] == self._chosen), None)

    def _start_command(self, arguments: list[str], *, is_page: bool = False) -> None:
        """Run a command beside the polling; its output is shown at the bottom, or as a page."""
        namespace = self._document["namespace"] if self._document else ""
        self._message = f"dynaplan {' '.join(arguments)} ..."
        full = [*arguments, *(["--namespace", namespace] if namespace else [])]
        task = asyncio.get_running_loop().create_task(self._run_command(full, is_page=is_page))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _run_command(self, arguments: list[str], *, is_page: bool) -> None:
        output = await self._call(arguments)
        if is_page:
            self._message = ""
            self._show(output)
        else:
            self._message = " / ".join(line.strip() for line in output.splitlines())
        self._wake.set()

    def _show(self, text: str) -> None:
        self._text, self._scroll = text.split("\n"), 0

    # -- drawing ---------------------------------------------------------------------------------

    def _draw(self) -> None:
        height, width = self._window.getmaxyx()
        footer = fold(self._question[0] if self._question else self._message or KEYS, width).split("\n")
        footer = footer[: max(1, height // 3)]
        rows = max(1, height - len(footer))
        lines, marked = self._body(rows, width)
        lines += [""] * (rows - len(lines))
        paint(self._window, [*lines, *footer], marked)

    def _body(self, rows: int, width: int) -> tuple[list[str], int | None]:
        """Return the lines of the page, at most ``rows``, and the place of the chosen worker among them."""
        if self._shown_log:
            lines = [line for each in self._log(self._shown_log, LOG_LINES) for line in _wrapped(each, width)]
            return self._part([f"{self._shown_log}  (escape: back)"], lines, rows), None
        if self._text is not None:
            lines = [line for each in self._text for line in fold(each, width, " " * 4).split("\n")]
            return self._part([], lines, rows), None
        if self._document is None:
            return [], None
        view = view_of(self._document, time.time())
        lines, places = main_page(view, width)
        marked = places.get(self._chosen)
        start = max(0, marked - rows + 2) if marked is not None and marked >= rows else 0
        return lines[start : start + rows], None if marked is None else marked - start

    def _part(self, head: list[str], lines: list[str], rows: int) -> list[str]:
        """Return the part of a long text that is scrolled to, below its head."""
        room = rows - len(head)
        self._scroll = min(max(self._scroll, 0), max(0, len(lines) - room))
        return [*head, *lines[self._scroll : self._scroll + room]]


MODEL_CHOICE = "model "
"""What stands before a model's name where it is chosen: no worker's name has a space."""


def main_page(view: View, width: int) -> tuple[list[str], dict[str, int]]:
    """Return the lines of the page of a deployment, and the places of what can be chosen among them."""
    head = render_lines([view.title, view.service, *view.load], width).split("\n")
    head += filter(None, render_decision(view, width).split("\n"))
    lines = [*head, "", *render_workers(view, width).split("\n"), ""]
    places = {name: place for place, name in enumerate(view.names, len(head) + 2)}
    if models := render_models(view, width):
        names = [MODEL_CHOICE + row[0] for row in view.models[1:]]
        places |= {name: place for place, name in enumerate(names, len(lines) + 1)}
        lines += [*models.split("\n"), *filter(None, render_lines(view.memory, width).split("\n")), ""]
    if keys := render_keys(view, width):
        lines += [*keys.split("\n"), ""]
    if gpus := render_gpus(view, width):
        lines += [*gpus.split("\n"), ""]
    lines += render_lines(view.notes, width).split("\n")
    return lines, places


def _wrapped(line: str, width: int) -> list[str]:
    """Return a line of a log as lines of the screen; tabs and control characters are shown as spaces."""
    clean = "".join(character if character.isprintable() else " " for character in line)
    return [clean[place : place + width] for place in range(0, len(clean), width)] or [""]


_SGR = re.compile(r"\x1b\[([\d;]*)m")
_COLOURS = {31: curses.COLOR_RED, 32: curses.COLOR_GREEN, 33: curses.COLOR_YELLOW}
"""The codes that ``click.style`` writes for the colours of ``util/screen.py``."""


def init_colours(is_coloured: bool) -> None:
    """Choose the pairs of colours, after curses has begun; a terminal without colours stays as it is."""
    with suppress(curses.error):  # some terminals cannot hide the cursor
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
