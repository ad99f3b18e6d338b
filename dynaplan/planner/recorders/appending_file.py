"""A file that only grows; an error of the disk never reaches its writer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class AppendingFile:
    """Appends whole chunks; when that fails (disk full, no permission), logs it once and goes on trying.

    ``name`` gives the path each time the file is opened, and ``opening`` the first bytes to write then. After
    a chunk that could be written only in part, the file is opened anew in this way.
    """

    def __init__(self, name: Callable[[], Path], opening: Callable[[], bytes] = bytes) -> None:
        self._name = name
        self._opening = opening
        self._descriptor = -1
        self._is_failing = False

    def append(self, chunk: bytes) -> bool:
        """Write the chunk, and tell whether all of it was; never raises OSError."""
        try:
            self._write(chunk)
        except OSError as error:
            self._fail(error)
            return False
        if self._is_failing:
            log.info("writing again")
        self._is_failing = False
        return True

    def close(self) -> None:
        """Close the file; the next chunk would open it again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, chunk: bytes) -> None:
        if self._descriptor < 0:
            path = self._name()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            chunk = self._opening() + chunk
        while chunk:
            chunk = chunk[os.write(self._descriptor, chunk) :]

    def _fail(self, error: OSError) -> None:
        if not self._is_failing:
            log.warning("what the planner sees and decides is not written down: %s", error)
        self._is_failing = True
        self.close()
