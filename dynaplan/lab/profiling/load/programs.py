"""Foreign programs, run as child processes of which nothing is left."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ENDING_S = 10.0
"""Seconds that a program may take to end after SIGTERM, before it is killed."""


def find_program(name: str) -> str:
    """Return the program's path, on PATH or beside this Python; empty when there is none."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)) or ""


async def run_program(
    command: Sequence[str], log_path: Path, environment: Mapping[str, str], timeout_s: float
) -> int:
    """Run the program to its end, its output in the log; return its exit code.

    Raises TimeoutError after ``timeout_s``, OSError when it cannot be started. In every case the program and
    its children have ended.
    """
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,  # its process group is its own: it can be ended as a whole
        )
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    """End it in order when it still runs; then kill what is left of its process group."""
    try:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(ENDING_S):
                await process.wait()
    except TimeoutError:
        pass  # it is killed below
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.wait()
