"""Processes that a test session has started and not ended, in whichever of its workers."""

from __future__ import annotations

import os
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "DYNAPLAN_TEST_RUN"
"""In the environment of every process that comes of a session, pytest-xdist's workers among them."""

WITHIN_S = 10.0
"""As long as the last ones may take to end."""


def mark_session() -> str:
    """From now on every process that this one starts has a mark of its own; the mark."""
    os.environ[MARK] = uuid.uuid4().hex
    return os.environ[MARK]


def marked(mark: str) -> dict[int, str]:
    """The processes that were started with that mark, but for this one: pid -> command line."""
    found = {}
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (directory / "environ").read_bytes().split(b"\0")
            if f"{MARK}={mark}".encode() in environment and directory.name != str(os.getpid()):
                command = (directory / "cmdline").read_bytes()
                found[int(directory.name)] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


def end_leftovers(mark: str, within_s: float = WITHIN_S) -> dict[int, str]:
    """Kill what is still there after that time; what it was."""
    deadline_s = time.monotonic() + within_s
    while (left := marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left
