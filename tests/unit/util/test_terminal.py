"""Lines for a terminal, a pipe or a journal: taken where there is room, dropped where nobody reads."""

from __future__ import annotations

import fcntl
import os
import pty
import socket
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.util.terminal import try_write_line


@pytest.fixture
def ends() -> Iterator[list[int]]:
    """Descriptors that are closed afterwards."""
    opened: list[int] = []
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def test_a_pipe_that_nobody_reads_takes_lines_until_it_is_full_and_then_none(ends: list[int]) -> None:
    reader, writer = os.pipe()
    ends += reader, writer
    taken = 0
    while try_write_line("x" * 999, writer):
        taken += 1
    assert 10 < taken < 1000
    assert os.read(reader, 1_000_000) == (b"x" * 999 + b"\n") * taken
    assert try_write_line("read again", writer)
    assert os.read(reader, 100) == b"read again\n"


def test_a_terminal_that_nobody_reads_holds_up_nothing(ends: list[int]) -> None:
    master, terminal = pty.openpty()
    ends += master, terminal
    lines = 0
    while try_write_line(f"{lines:06}", terminal) and lines < 1_000_000:
        lines += 1
    assert 100 < lines < 1_000_000


def test_a_terminal_that_is_held_takes_nothing_until_it_goes_on(ends: list[int]) -> None:
    master, terminal = pty.openpty()
    ends += master, terminal
    termios.tcflow(terminal, termios.TCOOFF)  # what Ctrl-S does
    assert not try_write_line("held", terminal)
    termios.tcflow(terminal, termios.TCOON)
    assert try_write_line("goes on", terminal)
    assert os.read(master, 100) == b"goes on\r\n"


def test_a_socket_that_nobody_reads_holds_up_nothing(ends: list[int]) -> None:
    """The journal of systemd is a stream socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        taken = 0
        while try_write_line("x" * 999, ours.fileno()):
            taken += 1
        assert taken > 10


def test_a_file_takes_every_line(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        assert try_write_line("one", file.fileno())
        assert try_write_line("two", file.fileno())
    assert (tmp_path / "out").read_text() == "one\ntwo\n"


def test_what_is_gone_takes_nothing(ends: list[int]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert not try_write_line("gone", writer)
    os.close(writer)
    assert not try_write_line("closed", writer)
    master, terminal = pty.openpty()
    ends.append(terminal)
    os.close(master)
    assert not try_write_line("hung up", terminal)


def test_others_of_the_same_terminal_still_wait(ends: list[int]) -> None:
    """The descriptor is shared with the user's shell, which expects that a write waits."""
    master, terminal = pty.openpty()
    ends += master, terminal
    assert try_write_line("a line", terminal)
    assert not fcntl.fcntl(terminal, fcntl.F_GETFL) & os.O_NONBLOCK
