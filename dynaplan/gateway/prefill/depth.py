"""Read the prefill queue's length in the background, so that no request waits for the reading."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynaplan.events.port import WorkQueue
from dynaplan.gateway.prefill.disaggregation import QueueReading
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)

INTERVAL_S = 0.05
"""Time between two readings while requests flow."""

BUSY_S = 0.5
"""Requests count as flowing for this long after the last one asked for the depth."""

IDLE_INTERVAL_S = 1.0
"""Time between two readings otherwise; the reading ends when the queue is empty."""


class PrefillDepth:
    """Estimates the queue's depth from the last reading and the change of this frontend's own requests since.

    ``own`` returns the number of this frontend's requests in the queue now. ``found_empty`` is called after
    each reading of 0, with the time (on the loop's clock) at which that reading began.
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
        """The estimated number of prefills in the queue at this moment."""
        return self._reading.estimate(self._own())

    def keep(self, queue: WorkQueue) -> None:
        """Keep reading the depth for the next ``BUSY_S``, and then until the queue is empty."""
        self._asked_s = self._loop.time()
        if self._task is None or self._task.done():
            self._task = self._loop.create_task(self._read_on(queue))

    async def close(self) -> None:
        """Cancel the reading of the queue's depth; the last value stays."""
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
