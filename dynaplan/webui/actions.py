"""What the page and ``top`` do for their user: commands of dynaplan. And a worker's log, part by part."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.process.subprocesses import kill_with_group, start_process

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)
"""The form of a worker's name, or of a log's: never an option, never a path."""

MAX_NAME = 500
"""The most characters of a model's name."""

ROLES = frozenset(role.value for role in SCALED_ROLES)


def command_arguments(action: Mapping[str, Any]) -> list[str]:
    """Return the command of an action of the page or ``top``; raises ValueError where there is none.

    ``{"do": "scale", "role": "decode", "by": 1}``; ``hold`` and ``release`` take a role, ``restart`` a
    worker, ``drain`` both; ``load``, ``unload``, ``pin`` and ``unpin`` a model that is loaded on request.
    """
    match action:
        case {"do": "scale", "role": str(role), "by": int(by)} if role in ROLES and by in (-1, 1):
            return ["scale", f"{role}={by:+d}", "--no-wait"]
        case {"do": "hold", "role": str(role)} if role in ROLES:
            return ["scale", f"{role}=+0", "--hold", "--no-wait"]
        case {"do": "release", "role": str(role)} if role in ROLES:
            return ["release", role]
        case {"do": "drain", "role": str(role), "worker": str(worker)} if role in ROLES and _is_name(worker):
            return ["scale", f"{role}=-1", "--leaving", worker, "--no-wait"]
        case {"do": "restart", "worker": str(worker)} if _is_name(worker):
            return ["restart", worker]
        case {"do": "load" | "unload" | "pin" as order, "model": str(model)} if _is_model(model):
            return [order, model, "--no-wait"]
        case {"do": "unpin", "model": str(model)} if _is_model(model):
            return ["unpin", model]
    raise ValueError("There is no such action.")


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


def _is_model(text: str) -> bool:
    """Tell whether the text can be a model's name: any printable characters, but not like an option."""
    return text.isprintable() and not text.startswith("-") and 0 < len(text) <= MAX_NAME


INTERRUPT_TIMEOUT_S = 5.0
"""The time for a command to take back what it has half done, seconds."""


async def run_command(arguments: Sequence[str]) -> str:
    """Run a command of dynaplan in a process of its own; return its output and errors, however it ended.

    Cancelled, it interrupts the command as Ctrl-C does, and kills it when it has not ended in time.
    """
    process = await start_process(
        *(sys.executable, "-m", "dynaplan", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError, TimeoutError):
            os.kill(process.pid, signal.SIGINT)
            async with asyncio.timeout(INTERRUPT_TIMEOUT_S):
                await process.wait()
        raise
    finally:
        kill_with_group(process)
        await process.wait()
    return output.decode(errors="replace").rstrip()


PART_BYTES = 64 * 1024
"""The number of bytes that are read at once, and of the end that is shown at first."""


def log_part(log_dir: Path, name: str, offset: int) -> tuple[str, int]:
    """Return a log's text from byte ``offset`` on, at most ``PART_BYTES``, and the offset to go on from.

    A negative offset stands for the first whole line in the last ``PART_BYTES``. A log that is shorter than
    the offset has begun anew: it is read from its beginning. Raises FileNotFoundError without a log of the
    name.
    """
    if not NAME.fullmatch(name):
        raise FileNotFoundError(name)
    descriptor = os.open(log_dir / f"{name}.log", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(name)
        size = found.st_size
        start = max(0, size - PART_BYTES) if offset < 0 else offset if offset <= size else 0
        file.seek(start)
        part = file.read(PART_BYTES)
    if offset < 0 < start:
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
