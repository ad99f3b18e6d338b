"""The leases that this process holds: one that it does not renew in time is ended by it.

No other process looks at the time: a lease of a process that is gone ends with its pod.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import DynaplanError, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

FIRST_DELAY_S, LAST_DELAY_S = 0.1, 2.0


class HeldLeases:
    """The own leases and when each lapses; ``end`` ends one in the store.

    An attempt to renew counts, whether the store answers it or not: its holder wants the lease to live on.
    """

    def __init__(self, end: Callable[[int], Awaitable[None]]) -> None:
        self._end = end
        self._held: dict[int, tuple[float, asyncio.TimerHandle]] = {}
        self._tasks = BackgroundTasks()

    def __contains__(self, lease: int) -> bool:
        """Tell whether this process holds the lease."""
        return lease in self._held

    def hold(self, lease: int, ttl_s: float) -> None:
        """Begin with a lease: it lapses after ``ttl_s`` seconds without ``renew``."""
        timer = asyncio.get_running_loop().call_later(ttl_s, self._lapse, lease)
        self._held[lease] = (ttl_s, timer)

    def renew(self, lease: int) -> None:
        """Have the lease's time begin anew; nothing happens with one that is not held."""
        if lease in self._held:
            self.hold(lease, self._dropped(lease))

    def drop(self, lease: int) -> None:
        """Hold the lease no more."""
        if lease in self._held:
            self._dropped(lease)

    async def close(self) -> None:
        """Hold nothing any more; what the store has of the leases stays."""
        for lease in tuple(self._held):
            self._dropped(lease)
        await self._tasks.cancel()

    def _dropped(self, lease: int) -> float:
        ttl_s, timer = self._held.pop(lease)
        timer.cancel()
        return ttl_s

    def _lapse(self, lease: int) -> None:
        self._tasks.spawn(self._ended(lease, self._held[lease]), f"end of lease {lease:x}")

    async def _ended(self, lease: int, lapsed: tuple[float, asyncio.TimerHandle]) -> None:
        """End the lease, whenever the store answers, unless it has been renewed meanwhile."""
        backoff = Backoff(FIRST_DELAY_S, LAST_DELAY_S)
        while self._held.get(lease) is lapsed:
            try:
                await self._end(lease)
            except StoreUnavailable:
                await backoff.pause()
            except DynaplanError as error:
                log.warning("lease %x has lapsed and cannot be ended: %s", lease, error)
                return
