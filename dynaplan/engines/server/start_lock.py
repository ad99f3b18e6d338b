"""One engine at a time starts on a GPU.

Engines that measure the free memory while they start (vLLM, SGLang, TensorRT-LLM) fail or take too much when
another one starts beside them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dynaplan.process.node_directory import HINT, open_node_directory, try_lock, unlock
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.1


@asynccontextmanager
async def exclusive_start(names: Sequence[str], directory: Path) -> AsyncIterator[None]:
    """Alone on the machine behind every one of these names: GPU UUIDs, or ``host``.

    Waits for those before us without holding up the event loop; always in the same order, so that no two wait
    for each other. The kernel gives the places of a killed process to the next one.
    Raises DeploymentError when the directory cannot be used.
    """
    held: list[tuple[str, int]] = []
    opened = _open(directory)
    try:
        for name in sorted({_file_name(name) for name in names}):
            held.append((name, await _lock(opened, name)))
        yield
    finally:
        for name, descriptor in reversed(held):
            unlock(opened, name, descriptor)
        os.close(opened)


async def _lock(directory: int, name: str) -> int:
    is_told = False
    while True:
        try:
            descriptor = try_lock(directory, name)
        except OSError as error:
            raise DeploymentError(f"cannot take turns at starting: {error.strerror}", hint=HINT) from error
        if descriptor is not None:
            return descriptor
        if not is_told:
            is_told = True
            log.info("another engine is starting (%s); waiting for it", name)
        await asyncio.sleep(LOCK_POLL_S)


def _open(directory: Path) -> int:
    try:
        return open_node_directory(directory)
    except OSError as error:
        message = f"cannot take turns at starting in {directory}: {error.strerror}"
        raise DeploymentError(message, hint=HINT) from error


def _file_name(name: str) -> str:
    return f"start-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.lock"
