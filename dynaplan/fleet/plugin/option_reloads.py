"""Has the changes of engines' options made that the planner asks for: by ``dynaplan reload``, one at a time.

The command is a child of the plugin, and the kernel ends it with the plugin. A change without a result is
begun again by the next plugin: the command finds the reload that was not finished, and goes on with it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dynaplan.contract.option_changes import DONE, OPTION_CHANGE, OptionChange
from dynaplan.process.subprocesses import kill_with_group, start_process

if TYPE_CHECKING:
    from dynaplan.fleet.plugin.store_link import StoreLink

log = logging.getLogger(__name__)

RETRY_S = 5.0
"""Time after which a result that the store has not taken is written again."""

MAX_RESULT_CHARACTERS = 300
"""The part of a failure that is kept: it stands in the trail of decisions."""

Carry = Callable[[str, OptionChange], Awaitable[str]]
"""Makes a change in the deployment of that namespace; returns its result."""


class OptionReloads:
    """The changes of options of one deployment; ``carry`` makes one."""

    def __init__(self, namespace: str, link: StoreLink, carry: Carry | None = None) -> None:
        self._namespace = namespace
        self._link = link
        self._carry = carry or reload_option
        self._made: tuple[str, str] = "", ""

    async def run(self) -> None:
        """Make each change that has no result yet, and write its result, until it is cancelled."""
        changed = asyncio.Event()
        self._link.on_persisted_change(changed.set)
        while True:
            changed.clear()
            is_open = await self.poll()
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S if is_open else None):
                    await changed.wait()

    async def poll(self) -> bool:
        """Make the change that is asked for, if there is one, and have its result written.

        A result that was not written, since the store was away, is written again. True while one is to be.
        """
        text = self._link.option_change
        change = _read(text)
        if change is None or change.result:
            return False
        if self._made[0] != text:
            log.info("engine option %s: it begins", change)
            result = await self._carry(self._namespace, change)
            log.info("engine option %s: %s", change, result)
            self._made = text, replace(change, result=result).to_text()
        self._link.replace(OPTION_CHANGE, *self._made)
        return True


async def reload_option(namespace: str, change: OptionChange) -> str:
    """Run ``dynaplan reload`` for the change, and return its result."""
    words = ("reload", namespace, "--yes", "--by-planner", change.to_text())
    process = await start_process(
        *(sys.executable, "-P", "-m", "dynaplan", *words), stdin=DEVNULL, stdout=PIPE, stderr=PIPE
    )
    try:
        printed, errors = await process.communicate()
    finally:
        kill_with_group(process)
        await process.wait()
    for line in printed.decode(errors="replace").splitlines():
        log.info("reload: %s", line)
    if not process.returncode:
        return DONE
    told = errors.decode(errors="replace").strip().rpartition("Error: ")[2]
    log.warning("reload: %s", told)
    why, *_ = told.splitlines() or [f"exit code {process.returncode}"]
    return why[:MAX_RESULT_CHARACTERS]


def _read(text: str) -> OptionChange | None:
    """Return the change that the key holds; None for none, and for a value that is none."""
    try:
        return OptionChange.from_text(text) if text else None
    except ValueError as error:
        log.debug("ignoring %s: %s", OPTION_CHANGE, error)
        return None
