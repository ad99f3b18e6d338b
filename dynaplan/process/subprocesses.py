"""Start a process from an event loop so that a cancelled start leaves nothing behind, and kill one."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from contextlib import suppress
from typing import Any


async def start_process(*command: str, **options: Any) -> Process:
    """Start a process as ``asyncio.create_subprocess_exec`` does, with the same ``options``.

    Cancelled while it starts, this kills the process with its group, and raises CancelledError once it is
    gone. ``create_subprocess_exec`` kills the process alone, and on uvloop does not wait for its end.
    """
    starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_kill_started)  # also where the wait for its end is cancelled in turn
        with suppress(OSError):  # it could not be started
            process = await asyncio.shield(starting)
            await process.wait()
        raise


def _kill_started(starting: asyncio.Future[Process]) -> None:
    if not starting.cancelled() and not starting.exception():
        kill_with_group(starting.result())


def kill_with_group(process: Process) -> None:
    """Kill the process, and its group if it leads one.

    Not when it has a ``returncode``: its pid may be another's by then.
    Not by ``Process.kill``: that reaps a process that has just ended, and asyncio, which waits for it, then
    warns of an unknown child.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # it may not have made its group yet
            os.killpg(process.pid, signal.SIGKILL)
