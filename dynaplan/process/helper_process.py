"""A helper process, a Python module of ours that runs beside a process: its environment and its end."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import dynaplan

PASSED_ON = ("PYTHON", "COV")
"""Prefixes of the variables that a helper gets: none of them is a secret, and it needs no other."""


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of Python and its coverage; the helper finds this dynaplan, installed or not."""
    environment = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    paths = [environment.get("PYTHONPATH", ""), str(Path(dynaplan.__file__).resolve().parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def kill_helper(process: Process) -> None:
    """Kill it, unless its end is noted.

    Not by ``Process.kill``: that takes the exit status of a process that has just ended, and asyncio, which
    waits for it, then warns of an unknown child.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


async def end_helper(process: Process) -> None:
    """Kill it; return when it is gone. Waiting goes on when this is cancelled: nothing else notes its end."""
    kill_helper(process)
    await asyncio.shield(process.wait())
