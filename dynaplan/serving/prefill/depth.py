"""How full the prefill queue is: read in the background, so that no request waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynaplan.core.routing.disaggregation import QueueReading
from dynaplan.domain.errors import DynaplanError
from dynaplan.ports import WorkQueue

log = logging.getLogger(__name__)

INTERVAL_S = 0.05
"""How often the depth is read while requests flow."""

BUSY_S = 0.5
"""Requests flow when the last one asked no longer ago."""

IDLE_INTERVAL_S = 1.0
"""How often otherwise, until the queue is empty; then no more."""


class PrefillDepth:
    """Estimates the depth from its last reading and the reader's own requests.

    ``own`` counts the reader's requests in the queue now; ``found_empty`` is told of each reading that
    finds nothing, with the time (on the loop's clock) at which it began.
    """

    def __init__(self, own: Callable[[], int], found_empty: Callable[[float], None]) -> None:
        self._own = own
        self._found_empty = found_empty
        self._loop = asyncio.get_running_loop()
        self._reading = QueueReading()
        self._asked_s = float("-inf")
        self._task: asyncio.Task[None] | None = None

    @property
    def estimate(self) -> int:
        """The depth at this moment, as far as it is known."""
        return self._reading.estimate(self._own())

    def keep(self, queue: WorkQueue) -> None:
        """Somebody needs the depth: keep reading it for a while."""
        self._asked_s = self._loop.time()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._read_on(queue))

    async def close(self) -> None:
        """Stop reading."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _read_on(self, queue: WorkQueue) -> None:
        while (is_busy := self._loop.time() - self._asked_s < BUSY_S) or self.estimate:
            await self._read(queue)
            await asyncio.sleep(INTERVAL_S if is_busy else IDLE_INTERVAL_S)

    async def _read(self, queue: WorkQueue) -> None:
        begun_s, own = self._loop.time(), self._own()
        try:
            self._reading = QueueReading(await queue.depth(), own)
        except DynaplanError as error:
            log.debug("the prefill queue's depth cannot be read: %s", error)
            self._reading = QueueReading()
            return
        if not self._reading.depth:
            self._found_empty(begun_s)
