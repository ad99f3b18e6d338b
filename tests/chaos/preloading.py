"""A library that is preloaded into a deployment's processes: their wall clock can be set, their disk be slow.

It stands between the programs and the C library, which asks the kernel as ever: a process sees what it would
see of a clock that somebody has set, and of a disk whose queue is long. Programs that ask the kernel
themselves (etcd, nats-server) see neither. A monotonic clock is never set, here as there.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "preloaded.c"
TOLD = struct.Struct("dd")


class Preloaded:
    """The library, compiled; ``ahead_s`` and ``write_s`` are told to all processes at once."""

    def __init__(self, directory: Path) -> None:
        self._told = directory / "told"
        self._library = directory / "preloaded.so"
        self.tell()
        command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(self._library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)

    @property
    def environment(self) -> dict[str, str]:
        """The variables with which a process is to be started."""
        return {"LD_PRELOAD": str(self._library), "CHAOS_TOLD": str(self._told)}

    def tell(self, *, ahead_s: float = 0.0, write_s: float = 0.0) -> None:
        """Set the wall clock ahead, or back, and let each write wait that long for the disk, in seconds."""
        with self._told.open("r+b" if self._told.exists() else "w+b") as told:
            told.write(TOLD.pack(ahead_s, write_s))


def preloaded(directory: Path) -> Preloaded | None:
    """Compile the library, where there is a compiler."""
    return Preloaded(directory) if shutil.which("cc") else None
