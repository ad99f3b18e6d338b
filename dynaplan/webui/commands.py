"""Actions of a person at a screen: the commands that they stand for, and running one."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dynaplan.fleet.store_keys import SCALED_ROLES

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)
"""The form of a worker's name, or of a log's: never an option, never a path."""

ROLES = frozenset(role.value for role in SCALED_ROLES)


def arguments_of(action: Mapping[str, Any]) -> list[str]:
    """Return the command of an action of the page; raises ValueError with what is wrong with it.

    ``{"do": "scale", "role": "decode", "by": 1}``; ``hold`` and ``release`` take a role, ``restart`` a
    worker, ``drain`` both.
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
    raise ValueError("There is no such action.")


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


async def called(arguments: Sequence[str]) -> str:
    """Run a command of dynaplan in a process of its own; return all that it wrote."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "dynaplan", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace").rstrip()
