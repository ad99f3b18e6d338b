"""``dynaplan top`` on a terminal of its own: a pty of 80 columns."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

from click.testing import CliRunner

from dynaplan.cli.main import group

ROOT = Path(__file__).parents[4]

SCRIPT = """
import asyncio
from types import SimpleNamespace
from dynaplan.cli.watching import top
from tests.unit.cli.watching.documents import document, gpu_document, worker_document

async def look():
    return document(worker_document(), gpus=[gpu_document(0, ("dynamo_VllmWorker",))], load=None)

async def close():
    print("closed")

asyncio.run(top._run(SimpleNamespace(look=look, close=close, found=None)))
"""


def until(screen: int, mark: bytes) -> bytes:
    """Read what is drawn until the mark is; a terminal that ends raises OSError."""
    text = b""
    while mark not in text:
        text += os.read(screen, 65536)
    return text


def test_it_draws_takes_keys_and_leaves_the_terminal_as_it_was() -> None:
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        start_new_session=True,
    )
    try:
        drawn = until(screen, b"quit")
        if b"dynamo_VllmWorker" not in drawn:
            drawn += until(screen, b"dynamo_VllmWorker")
        os.write(screen, b"?")
        until(screen, b"choose a worker")
        os.write(screen, b"qq")
        until(screen, b"closed")
        assert process.wait(30) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait(30)
        os.close(screen)
        os.close(terminal)


def test_without_a_terminal_it_names_the_command_that_needs_none() -> None:
    error = CliRunner().invoke(group, ["top"]).exception
    assert "`dynaplan status --watch`" in str(error)
