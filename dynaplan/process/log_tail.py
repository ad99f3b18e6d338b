"""The end of a log file, and what is written to it from then on."""

from __future__ import annotations

import os
from pathlib import Path


class LogTail:
    """The lines of one log file, and of its successor after a rotation.

    ``partial_line`` is the beginning of a line that was not complete at the last reading.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open(errors="replace")
        self.partial_line = ""

    def close(self) -> None:
        self._file.close()

    def last_lines(self, number: int) -> list[str]:
        """Go to the end of the file, and return that number of complete lines before it, or all."""
        size_bytes = self._file.seek(0, os.SEEK_END)
        window_bytes = 4096 + 400 * number
        while True:
            start_bytes = max(0, size_bytes - window_bytes)
            self._file.seek(start_bytes)
            self.partial_line = ""
            lines = self._read()
            if start_bytes == 0 or len(lines) > number:  # one more: the first may lack its beginning
                return lines[-number:] if number else []
            window_bytes *= 4

    def new_lines(self) -> list[str]:
        """Return the lines that were completed since the last reading; the first time, all of the file's."""
        lines = self._read()
        try:
            is_rotated = self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
            successor = self._path.open(errors="replace") if is_rotated else None
        except FileNotFoundError:
            return lines
        if successor:
            lines += self._read()
            self._file.close()
            self._file = successor
            lines += self._read()
        return lines

    def _read(self) -> list[str]:
        *lines, self.partial_line = (self.partial_line + self._file.read()).split("\n")
        return lines
