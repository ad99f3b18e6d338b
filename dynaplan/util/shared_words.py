"""Numbers that each of several processes on a machine writes for itself, and all of them read.

Each has a file of its own in a directory of theirs, mapped into memory. A word of eight bytes has one writer,
so nobody locks to read or write one, and a process that stands still holds nobody up. The file itself is
locked for as long as its writer lives: whoever can lock it may remove it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO


class SharedWords:
    """Numbers (64-bit words) that each process writes for the others to read, in mapped files of a directory.

    ``mine`` are those of this process, 0 at first; ``others`` those of each other process, by its file's
    name, as of the last ``look_for_others``. With ``directory`` None there are no others.
    """

    def __init__(self, directory: Path | None, number: int) -> None:
        self._directory = directory
        self._bytes = 8 * number
        self._name = secrets.token_hex(8)
        self._locked: BinaryIO | None = None
        self.mine = _words(bytearray(self._bytes))
        self.others: dict[str, memoryview[int]] = {}
        if directory:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.mine = self._own_file(directory)
            self.look_for_others()

    def look_for_others(self) -> None:
        """Bring ``others`` up to date: map the files of new processes, and remove those of ended ones."""
        if not self._directory:
            return
        found = {}
        for path in self._directory.glob("[!.]*"):
            if path.name == self._name:
                continue
            with suppress(OSError), path.open("r+b") as file:
                if _lock(file):
                    path.unlink()
                else:
                    known = self.others.get(path.name)
                    found[path.name] = known or _words(mmap.mmap(file.fileno(), self._bytes))
        self.others = found

    def close(self) -> None:
        """Let others remove the file of this process."""
        if self._locked:
            fcntl.flock(self._locked, fcntl.LOCK_UN)  # the map holds the file open
            self._locked.close()
            self._locked = None

    def _own_file(self, directory: Path) -> memoryview[int]:
        self._locked = file = (directory / f".{self._name}").open("w+b")
        _lock(file)
        file.truncate(self._bytes)
        os.rename(file.name, directory / self._name)
        return _words(mmap.mmap(file.fileno(), self._bytes))


def _lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _words(buffer: bytearray | mmap.mmap) -> memoryview[int]:
    return memoryview(buffer).cast("q")
