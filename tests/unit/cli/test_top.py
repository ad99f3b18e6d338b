"""The keys of ``dynaplan top``, on a window without a terminal."""

from __future__ import annotations

import asyncio
import curses
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from dynaplan.cli.main import group
from dynaplan.cli.top import LiveScreen, spans
from tests.fakes.polling import eventually
from tests.unit.cli.status_documents import document, gpu_document, model_document, worker_document


class FakeWindow:
    """A curses window of 80 columns and 24 lines.

    Copies: ``getch`` of a window with ``nodelay`` returns -1 without a key; what is drawn beyond the last
    column, or into the last cell of the last line, is an error.
    """

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.rows: list[str] = []
        self.marked = ""

    def getch(self) -> int:
        return self.keys.pop(0) if self.keys else -1

    def getmaxyx(self) -> tuple[int, int]:
        return 24, 80

    def erase(self) -> None:
        self.rows, self.marked = [""] * 24, ""

    def addnstr(self, row: int, column: int, text: str, most: int, attributes: int) -> None:
        if column + min(len(text), most) > 80 - (row == 23) or row > 23:
            raise curses.error("addnwstr() returned ERR")
        self.rows[row] += text[:most]
        if attributes & curses.A_REVERSE:
            self.marked += text[:most]

    def refresh(self) -> None: ...


class Terminal:
    """A screen that runs, with its window; ``run_command`` are the commands that its keys ran."""

    def __init__(self) -> None:
        self.window = FakeWindow()
        self.run_command: list[list[str]] = []
        self.document = document(
            worker_document("dynamo_Frontend", role="frontend", gpus=[]),
            worker_document("dynamo_VllmWorker", tokens_per_s=466.0),
            gpus=[gpu_document(0, ("dynamo_VllmWorker",)), gpu_document(1), gpu_document(2)],
            load=None,
        )
        self._reader, self._writer = os.pipe()
        window: Any = self.window
        self.screen = LiveScreen(window, self._poll, self._call, self._log, self._reader)

    async def _poll(self) -> dict[str, Any]:
        return self.document

    async def _call(self, arguments: Sequence[str]) -> str:
        self.run_command.append(list(arguments))
        return f"did {arguments[0]}\nand said so"

    def _log(self, worker: str, lines: int) -> list[str]:
        return [f"{worker} line {number}\t." for number in range(lines)]

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)

    async def press(self, keys: str | int, shown: Callable[[str], bool]) -> None:
        """Press keys one after another, and wait until the screen shows what they bring."""
        self.window.keys += [keys] if isinstance(keys, int) else map(ord, keys)
        os.write(self._writer, b"k")
        await eventually(lambda: not self.window.keys and shown("\n".join(self.window.rows)))
        os.read(self._reader, 1)


@pytest.fixture
async def top() -> AsyncIterator[Terminal]:
    terminal = Terminal()
    task = asyncio.create_task(terminal.screen.run())
    await eventually(lambda: any("dynamo_VllmWorker" in row for row in terminal.window.rows))
    yield terminal
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    terminal.close()


async def test_it_shows_the_view_and_the_keys(top: Terminal) -> None:
    shown = "\n".join(top.window.rows)
    for part in ("model llama", "counting requests", "TOK/S", "3 GPUs, H100", "1,2", "q quit"):
        assert part in shown


async def test_a_worker_is_chosen_and_scaled_by_the_command(top: Terminal) -> None:
    await top.press("jj", lambda _: top.window.marked.startswith("dynamo_VllmWorker"))
    await top.press("+", lambda shown: "did scale / and said so" in shown)
    await top.press("-", lambda shown: len(top.run_command) == 2)
    await top.press("h", lambda shown: len(top.run_command) == 3)
    assert top.run_command == [
        ["scale", "decode=+1", "--no-wait", "--namespace", "dynamo"],
        ["scale", "decode=-1", "--no-wait", "--namespace", "dynamo"],
        ["scale", "decode=+0", "--hold", "--no-wait", "--namespace", "dynamo"],
    ]
    top.document["holds"] = {"decode": {"at_least": 1, "at_most": 1}}
    await top.press("h", lambda shown: len(top.run_command) == 4)
    assert top.run_command[-1][:2] == ["release", "decode"]


async def test_draining_asks_first_and_names_the_worker_that_leaves(top: Terminal) -> None:
    await top.press("jjd", lambda shown: "Drain dynamo_VllmWorker, one decode worker less? y/n" in shown)
    await top.press("n", lambda shown: "Drain" not in shown)
    assert top.run_command == []
    await top.press("dy", lambda shown: "did scale" in shown)
    assert top.run_command[0][:4] == ["scale", "decode=-1", "--leaving", "dynamo_VllmWorker"]


async def test_a_restart_asks_first_too(top: Terminal) -> None:
    await top.press("jjr", lambda shown: "Restart dynamo_VllmWorker? y/n" in shown)
    await top.press("y", lambda shown: "did restart" in shown)
    assert top.run_command == [["restart", "dynamo_VllmWorker", "--namespace", "dynamo"]]


async def test_only_engine_workers_are_scaled(top: Terminal) -> None:
    await top.press("+", lambda shown: "choose a decode or prefill worker first" in shown)
    await top.press("j+", lambda shown: "choose a decode or prefill worker first" in shown)
    assert top.run_command == []


async def test_a_model_that_is_loaded_on_request_is_chosen_below_the_workers_and_moved(top: Terminal) -> None:
    top.document["on_request"] = {"ant": model_document(), "bee": model_document(state="unloaded")}
    await top.press("jj", lambda _: top.window.marked.startswith("dynamo_VllmWorker"))
    await top.press("jj", lambda _: top.window.marked.startswith("bee "))
    await top.press("+", lambda shown: "did load" in shown)
    await top.press("h", lambda shown: "did pin" in shown)
    top.document["on_request"]["bee"]["is_pinned"] = True
    await top.press("h", lambda shown: "did unpin" in shown)
    await top.press("d", lambda shown: "Unload bee? y/n" in shown)
    await top.press("y", lambda shown: "did unload" in shown)
    assert [each[:-2] for each in top.run_command] == [
        ["load", "--no-wait", "bee"],
        ["pin", "--no-wait", "bee"],
        ["unpin", "bee"],
        ["unload", "--no-wait", "bee"],
    ]
    await top.press("r", lambda shown: "choose a worker first" in shown)
    await top.press("l", lambda shown: "bee" in shown)


async def test_a_log_is_followed_from_its_end_and_scrolled(top: Terminal) -> None:
    await top.press("jl", lambda shown: "dynamo_Frontend line 499 ." in shown)
    await top.press("k", lambda shown: "line 499" not in shown and "line 498" in shown)
    await top.press(curses.KEY_HOME, lambda shown: "line 0 " in shown)
    await top.press("q", lambda shown: "model llama" in shown)


async def test_why_and_help_are_pages(top: Terminal) -> None:
    await top.press("w", lambda shown: "did why\nand said so" in shown)
    assert top.run_command == [["why", "--namespace", "dynamo"]]
    await top.press(27, lambda shown: "model llama" in shown)
    await top.press("?", lambda shown: "choose a worker" in shown)
    await top.press("q", lambda shown: "model llama" in shown)


def test_colours_become_attributes() -> None:
    assert list(spans("a \x1b[1mbold\x1b[0m end")) == [
        ("a ", curses.A_NORMAL),
        ("bold", curses.A_BOLD),
        (" end", curses.A_NORMAL),
    ]


def test_without_a_terminal_it_names_the_command_that_needs_none() -> None:
    error = CliRunner().invoke(group, ["top"]).exception
    assert "`dynaplan status --watch`" in str(error)


@pytest.mark.parametrize("term", ["dumb", "", "unheard-of"])
def test_on_a_terminal_whose_cursor_cannot_be_moved_it_says_so_and_draws_nothing(term: str) -> None:
    terminal, screen = os.openpty()
    try:
        run = subprocess.run(
            [sys.executable, "-m", "dynaplan", "top"],
            stdin=screen,
            stdout=screen,
            stderr=subprocess.PIPE,
            env={**os.environ, "TERM": term},
            text=True,
            check=False,
        )
        assert run.returncode == 2
        assert f"a cursor that can be moved; TERM is {term!r}" in run.stderr
        assert "dynaplan status --watch" in run.stderr
        assert not select.select([terminal], [], [], 0)[0]
    finally:
        os.close(terminal)
        os.close(screen)
