"""A lease that is kept alive in the background, and that tells its holder when it is lost."""

from __future__ import annotations

import asyncio
import logging

from dynaplan.store.port import LeaseKeeper
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DynaplanError

log = logging.getLogger(__name__)

RETRY_S = 0.25
"""Pause after a renewal that the store has not answered."""

TOO_SHORT_S = 0.001
"""Time to live in which no renewal can be answered any more."""

END_S = 2.0
"""Longest time that the end of a lease waits for the store: after that the lease is left to expire."""


class KeptLease:
    """A lease from ``granted`` to ``end``.

    It counts as lost when the store says that it is gone, and when no renewal was answered within its time to
    live. That time counts from the moment at which the renewal was sent, so the lease is lost here before the
    store lets it lapse and gives its keys to another.
    """

    def __init__(self, leases: LeaseKeeper, clock: Clock, number: int, lives_until_s: float) -> None:
        self._leases = leases
        self._clock = clock
        self._lives_until_s = lives_until_s
        self._is_ended = False
        self._keeping = asyncio.create_task(self._keep(), name=f"lease {number:x}")
        self.number = number
        """The lease's id in the store."""
        self.lost = asyncio.Event()
        """Set when the lease is lost; not when its holder has ended it."""

    @classmethod
    async def granted(cls, leases: LeaseKeeper, clock: Clock, ttl_s: int) -> KeptLease:
        """Make a lease; raises StoreUnavailable when the store does not answer."""
        asked_s = clock.now_s()
        return cls(leases, clock, await leases.grant(ttl_s), asked_s + ttl_s)

    @property
    def is_alive(self) -> bool:
        """True while the store certainly keeps the lease."""
        is_in_time = self._clock.now_s() < self._lives_until_s
        return is_in_time and not self._is_ended and not self.lost.is_set()

    def lose(self, why: str) -> None:
        """Give the lease up, for instance because its key is gone; ``why`` is for the log."""
        if not self._is_ended and not self.lost.is_set():
            log.warning("lease %x is lost: %s", self.number, why)
            self.lost.set()

    async def end(self) -> None:
        """Revoke the lease, and with it its keys; nothing happens the second time.

        Bounded: when the store is away the lease is left to expire.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._keeping.cancel()
        try:
            async with asyncio.timeout(END_S):
                await self._leases.revoke(self.number)
        except (TimeoutError, DynaplanError) as error:
            log.debug("lease %x expires by itself: %s", self.number, error or "no answer")

    async def _keep(self) -> None:
        """Renew at half of what remains."""
        pause_s = self._left_s / 2
        while not self.lost.is_set():
            await self._clock.sleep(pause_s)
            pause_s = self._left_s / 2 if await self._is_renewed() else min(RETRY_S, self._left_s)
            if pause_s < TOO_SHORT_S:
                self.lose("the store has not renewed it in time")

    async def _is_renewed(self) -> bool:
        sent_s = self._clock.now_s()
        try:
            async with asyncio.timeout(max(self._left_s, 0.0)):
                ttl_s = await self._leases.keep_alive(self.number)
        except (TimeoutError, DynaplanError) as error:
            log.debug("lease %x was not renewed: %s", self.number, error or "no answer")
            return False
        self._lives_until_s = sent_s + ttl_s
        return True

    @property
    def _left_s(self) -> float:
        return self._lives_until_s - self._clock.now_s()
