"""Announcing a process's event channels in the key-value store, under a lease of its own."""

from __future__ import annotations

import asyncio
import logging

from dynaplan.events.event_channels import EventChannel
from dynaplan.store.model import Transaction
from dynaplan.store.port import Store
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import PermanentError, StoreUnavailable

log = logging.getLogger(__name__)

LEASE_TTL_S = 10
STORE_ANSWER_S = 3.0
RETRY_FIRST_S = 0.05
RETRY_LONGEST_S = 2.0
CLOSE_S = 1.0


class ChannelAnnouncer:
    """Keeps the announcements in the store, whatever becomes of it: an outage, a wipe, a lapsed lease."""

    def __init__(self, store: Store, ttl_s: int = LEASE_TTL_S) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._channels: dict[str, str] = {}
        self._lease = 0
        self._changed = asyncio.Event()

    def announce(self, channel: EventChannel) -> None:
        """Have ``run`` write the channel into the store, and again whenever its lease was lost."""
        self._channels[channel.key] = channel.to_json()
        self._changed.set()

    async def run(self) -> None:
        """Keep every announced channel in the store under a lease, until cancelled."""
        backoff = Backoff(RETRY_FIRST_S, RETRY_LONGEST_S)
        while True:
            self._changed.clear()
            try:
                async with asyncio.timeout(STORE_ANSWER_S):
                    await self._ensure()
                backoff.reset()
            except (StoreUnavailable, TimeoutError) as error:
                if backoff.is_first:
                    log.warning("events are not announced, the store does not answer: %s", error)
                await backoff.pause()
            except PermanentError:
                self._lease = 0  # It has lapsed just now.
            else:
                await self._pause()

    async def close(self) -> None:
        """Take the announcements back; bounded, and left to the lease's end when the store is away."""
        if self._lease:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._store.revoke(self._lease)
            except (TimeoutError, StoreUnavailable) as error:
                log.debug("event channels stay announced: %s", error)

    async def _ensure(self) -> None:
        if not self._channels:
            return
        if not self._lease or not await self._store.keep_alive(self._lease):
            self._lease = await self._store.grant(self._ttl_s)
        missing = {
            key: value
            for key, value in self._channels.items()
            if (found := await self._store.get(key)) is None or found.lease != self._lease
        }
        if missing:
            await self._store.commit(Transaction(puts=missing, lease=self._lease))

    async def _pause(self) -> None:
        """Wait until the lease has to be renewed, or there is something to announce."""
        try:
            async with asyncio.timeout(self._ttl_s / 3):
                await self._changed.wait()
        except TimeoutError:
            pass
