"""Reads the log of a worker part by part, for a page that follows it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from dynaplan.webui.commands import NAME

PART_BYTES = 64 * 1024
"""The number of bytes that are read at once, and of the end that is shown at first."""


def log_part(log_dir: Path, name: str, after: int) -> tuple[str, int]:
    """Return what was written after that byte, at most one part, and the byte to go on from.

    A negative number is "the end of it". A log that is shorter than that began anew: it is read from its
    beginning. Raises FileNotFoundError when there is no log of that name.
    """
    if not NAME.fullmatch(name):
        raise FileNotFoundError(name)
    descriptor = os.open(log_dir / f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(name)
        size = found.st_size
        start = max(0, size - PART_BYTES) if after < 0 else after if after <= size else 0
        file.seek(start)
        part = file.read(PART_BYTES)
    if after < 0 < start:
        cut = part.find(b"\n") + 1
        start, part = start + cut, part[cut:]
    whole = _whole_characters(part)
    return part[:whole].decode(errors="replace"), start + whole


def _whole_characters(part: bytes) -> int:
    """Return the number of bytes before a UTF-8 character that is cut off at the end."""
    for back in range(1, min(4, len(part)) + 1):
        byte = part[-back]
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(part) - back if back < length else len(part)
        if byte < 0x80:
            break
    return len(part)
