"""A recommendation by a recording: ``dynaplan simulate --recommend`` in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dynaplan.adapters.engines.common.child import SECRETS
from dynaplan.domain.errors import TemporaryError
from dynaplan.foundation.children.helper_process import end_helper
from dynaplan.foundation.guard import guarded

RESULT, UNFINISHED, OUTPUT = "recommendation.json", "recommendation.part.json", "recommendation.log"
"""The files in the directory of the planners' logs: the rows of the table, one of them with ``recommended``;
the same while the process runs; and all that the last process has said."""

REPLACES_FILES = "DYN_DEPLOYMENT_CONFIG"
"""A variable that would stand in for the file that the process is given."""

PRIVATE = 0o600
"""The mode of these files, as that of all that a planner writes."""

LOWEST = 19
"""The niceness of the process: it computes while nothing else does."""


@dataclass(frozen=True)
class Recommended:
    """The recommendation of the last process in words, and its time by the clock on the wall."""

    words: str
    at_unix_s: float


def read_recommendation(directory: Path) -> Recommended | None:
    """Return the newest recommendation in a directory; None where there is none that can be read."""
    path = directory / RESULT
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        words = next(row["recommended"] for row in rows if "recommended" in row)
        return Recommended(str(words), path.stat().st_mtime)
    except (OSError, ValueError, TypeError, StopIteration):
        return None


class Recommender:
    """Recommends by simulating, and leaves the result in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def age_s(self) -> float | None:
        """Return the seconds since the last recommendation; None before there is one."""
        last = read_recommendation(self._directory)
        return None if last is None else max(0.0, time.time() - last.at_unix_s)

    async def recommend(self, config: str, arguments: Sequence[str]) -> str:
        """Simulate the deployment of that configuration (YAML); return what is recommended, in words.

        The process has the lowest priority and dies with this one. Raises TemporaryError with its last line.
        """
        file, log = self._directory / "recommendation.yaml", self._directory / OUTPUT
        file.touch(mode=PRIVATE)
        file.write_text(config, encoding="utf-8")
        log.unlink(missing_ok=True)
        part = self._directory / UNFINISHED
        command = [sys.executable, "-m", "dynaplan", "simulate", "--recommend", "-f", str(file), *arguments]
        process = await asyncio.create_subprocess_exec(
            *guarded(
                [*command, "--json", str(part)], os.getpid(), log=log, without=(*SECRETS, REPLACES_FILES)
            ),
            stdin=asyncio.subprocess.DEVNULL,
            umask=0o777 - PRIVATE,
        )
        try:
            with suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST)
            code = await process.wait()
        finally:
            await end_helper(process)
        if code:
            lines = log.read_text(errors="replace").split("\n") if log.exists() else []
            raise TemporaryError(next(filter(None, map(str.strip, reversed(lines))), f"it ended with {code}"))
        part.replace(self._directory / RESULT)
        found = read_recommendation(self._directory)
        return found.words if found else "nothing"
