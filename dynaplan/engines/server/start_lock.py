"""Which engines may start beside each other.

1. On a GPU one at a time (``exclusive_start``): engines that measure the free memory while they start (vLLM,
   SGLang, TensorRT-LLM) fail or take too much when another one starts beside them.
2. Without a GPU as many as cores and memory bear (``bounded_start``), if they are told how much to take. A
   start keeps about one core busy. Each waits until what all that start may take is available at once::

       starts < min(cores, MAX_STARTS, available memory // memory of one)

   An engine that has taken a part of its memory already counts for all of it once more, which errs on the
   safe side. One may always start: whether it fits is then for the engine to say.

Places are locks on files of the node directory, so they count for all deployments of the machine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from dynaplan.process.node_directory import HINT, open_node_directory, try_lock, unlock
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

LOCK_POLL_S = 0.1

MAX_STARTS = 8
"""Engines that start at once on a machine with any number of cores: they read from one disk."""

HOST = "host"


@asynccontextmanager
async def exclusive_start(names: Sequence[str], directory: Path) -> AsyncIterator[None]:
    """Hold the machine's lock of every one of these names (GPU UUIDs, or ``host``) while the context lasts.

    Waits for those before us without holding up the event loop; always in the same order, so that no two wait
    for each other. The kernel gives the locks of a killed process to the next one. Raises DeploymentError
    when the directory cannot be used.
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


@asynccontextmanager
async def bounded_start(
    need_bytes: float, directory: Path, available_bytes: Callable[[], float]
) -> AsyncIterator[None]:
    """Hold one of the machine's few places for starting engines, once ``need_bytes`` of memory are left.

    The first start waits for no memory. Raises DeploymentError when the directory cannot be used.
    """
    opened, taken, is_logged = _open(directory), None, False
    try:
        while taken is None:
            taken = await _take_place(opened, need_bytes, available_bytes)
            if taken is None:
                if not is_logged:
                    is_logged = True
                    log.info("other engines are starting; waiting for cores or memory (%d bytes)", need_bytes)
                await asyncio.sleep(LOCK_POLL_S)
        yield
    finally:
        if taken:
            unlock(opened, *taken)
        os.close(opened)


async def _take_place(
    directory: int, need_bytes: float, available_bytes: Callable[[], float]
) -> tuple[str, int] | None:
    """Lock a place to start in, and return its file's name and descriptor; None while there is none.

    Only who holds the lock of the host may count places, so that no two take the last one.
    """
    host = _file_name(HOST)
    counting = await _lock(directory, host)
    try:
        bound = min(len(os.sched_getaffinity(0)), MAX_STARTS)
        locks = {
            name: _try_lock(directory, name) for name in (_file_name(f"{HOST}-{n}") for n in range(bound))
        }
        free = [(name, descriptor) for name, descriptor in locks.items() if descriptor is not None]
        starts = bound - len(free)
        is_room = not starts or (starts + 1) * need_bytes <= available_bytes()
        taken = free.pop(0) if free and is_room else None
        for name, descriptor in free:
            unlock(directory, name, descriptor)
        return taken
    finally:
        unlock(directory, host, counting)


async def _lock(directory: int, name: str) -> int:
    is_told = False
    while True:
        if (descriptor := _try_lock(directory, name)) is not None:
            return descriptor
        if not is_told:
            is_told = True
            log.info("another engine is starting (%s); waiting for it", name)
        await asyncio.sleep(LOCK_POLL_S)


def _try_lock(directory: int, name: str) -> int | None:
    try:
        return try_lock(directory, name)
    except OSError as error:
        raise DeploymentError(f"cannot take turns at starting: {error.strerror}", hint=HINT) from error


def _open(directory: Path) -> int:
    try:
        return open_node_directory(directory)
    except OSError as error:
        message = f"cannot take turns at starting in {directory}: {error.strerror}"
        raise DeploymentError(message, hint=HINT) from error


def _file_name(name: str) -> str:
    return f"start-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}.lock"
