"""The forecasting process as its parent sees it: started, asked, killed.

``process_main`` is its other side, and says what the two tell each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import dynaplan
from dynaplan.engines.server.child import SECRET_PREFIXES
from dynaplan.util.errors import TemporaryError

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that are set to 1: many threads make small linear algebra a hundred times slower."""

MAIN = "dynaplan.planner.forecasting.library_process_main"
"""The module that the process runs."""

COMPLAINTS = "stderr.txt"
"""The file of the process's standard error, in its temporary directory."""


class ForecastingProcess:
    """One process and its children, in a group of their own. Spawn it from the main thread.

    Every failure of the process is a TemporaryError that says what happened.
    """

    def __init__(self, process: Process, directory: tempfile.TemporaryDirectory[str]) -> None:
        self._process = process
        self._directory = directory

    @classmethod
    async def spawn(cls, method: str) -> ForecastingProcess:
        """Start it; it is not ready yet. Its environment is ours, with one thread and without secrets."""
        # Prophet leaves files behind when it is killed; they go with the directory.
        directory = tempfile.TemporaryDirectory(prefix="dynaplan-forecast-")
        try:
            with (Path(directory.name) / COMPLAINTS).open("wb") as complaints:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", MAIN, method, str(os.getpid())),
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=complaints,
                    env=_environment() | {"TMPDIR": directory.name},
                )
        except BaseException:
            directory.cleanup()
            raise
        return cls(process, directory)

    @property
    def has_ended(self) -> bool:
        """True when the process has exited, for whatever reason."""
        return self._process.returncode is not None

    async def ready(self) -> None:
        """Return when its library is loaded."""
        message = await self._message()
        if "error" in message:
            raise TemporaryError(str(message["error"]))

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to one question, or its ``error``. When this is cancelled, close the process."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
            await stdin.drain()
        except OSError as error:
            raise TemporaryError("its process has ended") from error
        return await self._message()

    async def _message(self) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        line = await stdout.readline()
        if not line:
            raise TemporaryError(f"its process ended with {await self._process.wait()}{self._complaint()}")
        message: dict[str, Any] = json.loads(line)
        return message

    def _complaint(self) -> str:
        """The last line of its standard error."""
        try:
            text = (Path(self._directory.name) / COMPLAINTS).read_text(errors="replace")
        except OSError:
            return ""
        return "".join(f": {line}" for line in text.strip().splitlines()[-1:])

    async def close(self) -> None:
        """Kill it and its children; return when it is gone and its files are."""
        # Until its end is noted, its number is nobody else's.
        if not self.has_ended:
            with suppress(ProcessLookupError):
                try:
                    os.killpg(self._process.pid, signal.SIGKILL)
                except ProcessLookupError:  # so young that it has made no group of its own yet
                    os.kill(self._process.pid, signal.SIGKILL)
        await asyncio.shield(self._process.wait())
        self._directory.cleanup()


def _environment() -> dict[str, str]:
    """Our environment, with one thread and without secrets; it finds this dynaplan, installed or not."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(SECRET_PREFIXES)}
    paths = [environment.get("PYTHONPATH", ""), str(Path(dynaplan.__file__).resolve().parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment | dict.fromkeys(THREADS, "1")
