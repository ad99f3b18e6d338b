"""Each worker writes its own log: a file of everything the process prints, turned over when it is full."""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path

from dynaplan.util.clock import Clock
from dynaplan.util.log_lines import log_lines

MAX_LOG_BYTES = 10 * 1024 * 1024
KEPT = 3
CHECK_EVERY_S = 5.0


class LogFile:
    """Standard output and error of this process, written to ``path`` (mode 0600, appended).

    When it has grown beyond ``largest_bytes`` it becomes ``path.1``, the one before ``path.2`` and so on;
    ``kept`` of them stay.
    """

    def __init__(self, path: Path, largest_bytes: int = MAX_LOG_BYTES, kept: int = KEPT) -> None:
        self._path = path
        self._largest_bytes = largest_bytes
        self._kept = kept

    def redirect(self) -> None:
        """Send everything that this process and its children print into the file from now on."""
        global _own_log
        _own_log = self
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._path, flags, 0o600)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
        os.close(descriptor)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)

    def turn_over_if_full(self) -> bool:
        """Begin a new file if this one is full; a full disk or a removed directory is only logged.

        Returns whether it was full.
        """
        try:
            if os.fstat(2).st_size < self._largest_bytes:
                return False
            self._turn_over()
        except OSError as error:
            logging.getLogger(__name__).warning("the log cannot be turned over: %s", error)
        return True

    async def watch(self, clock: Clock) -> None:
        """Turn the file over whenever it is full, looking every few seconds, for ever."""
        while True:
            await clock.sleep(CHECK_EVERY_S)
            self.turn_over_if_full()

    def _turn_over(self) -> None:
        if os.path.lexists(self._path):  # else it was deleted, or a call before this one got no new file
            for number in range(self._kept - 1, 0, -1):
                older = self._numbered(number)
                if older.exists():
                    older.replace(self._numbered(number + 1))
            self._path.replace(self._numbered(1))
        self.redirect()

    def _numbered(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")


_own_log: LogFile | None = None


def write_bounded(text: bytes) -> None:
    """Write what another program prints into this process's log, which stays as large as it may be.

    Each new file begins with a line that says so. A full disk raises nothing.
    """
    with suppress(OSError):
        os.write(2, text)
    if _own_log is not None and _own_log.turn_over_if_full():
        logging.getLogger(__name__).warning("the log was full: it goes on here, and %d before it stay", KEPT)


def configure_logging() -> None:
    """Log to standard error, in the form that ``DYNAPLAN_LOG_FORMAT`` asks for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(log_lines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
