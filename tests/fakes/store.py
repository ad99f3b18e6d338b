"""The store in memory, steered by a test on the time of the running event loop.

Beyond what ``MemoryStore`` copies of etcd, as a server at the other end of a connection: an answer takes a
moment, a lease lapses without being looked at, nothing answers while it is frozen; while it is away no lease
lapses and watches wait to begin, and when it is back leases have their full TTL again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from dynaplan.store.memory import MemoryStore
from dynaplan.store.model import WatchEvent
from tests.fakes.clock import LoopClock

FROZEN_S = 3600.0
"""Longer than any patience, on a loop whose time is virtual."""


def _in_a_moment(call: Callable[..., Awaitable[Any]]) -> Any:
    """The call, answered when the store answers."""

    async def answered(self: FakeStore, *arguments: Any) -> Any:
        await asyncio.sleep(0.001 if not self.is_frozen else FROZEN_S)
        return await call(self, *arguments)

    return answered


class FakeStore(MemoryStore):
    def __init__(self) -> None:
        super().__init__(LoopClock())
        self.is_frozen = False
        self.keep_alives = 0
        self._ids = itertools.count(1001)

    get = _in_a_moment(MemoryStore.get)
    list = _in_a_moment(MemoryStore.list)
    put = _in_a_moment(MemoryStore.put)
    delete = _in_a_moment(MemoryStore.delete)
    commit = _in_a_moment(MemoryStore.commit)
    revoke = _in_a_moment(MemoryStore.revoke)
    identity = _in_a_moment(MemoryStore.identity)

    async def grant(self, ttl_s: int) -> int:
        await asyncio.sleep(0.001 if not self.is_frozen else FROZEN_S)
        lease = await super().grant(ttl_s)
        self._look_after(ttl_s)
        return lease

    async def keep_alive(self, lease: int) -> float:
        await asyncio.sleep(0.001 if not self.is_frozen else FROZEN_S)
        self.keep_alives += 1
        ttl_s = await super().keep_alive(lease)
        self._look_after(ttl_s)
        return ttl_s

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        while not self.is_available:
            await asyncio.sleep(0.01)
        async for event in super().watch(prefix):
            yield event

    def expire(self) -> None:
        if self.is_available:
            super().expire()

    def go_away(self) -> None:
        self.is_available = False

    def come_back(self) -> None:
        self.is_available = True
        for lease in self._leases.values():
            lease.until_s = self._clock.now_s() + lease.ttl_s
            self._look_after(lease.ttl_s)

    def come_back_empty(self) -> None:
        self.wipe()
        self.is_available = True

    def _look_after(self, seconds: float) -> None:
        """Have a lease of that time end when it is over, though nobody asks."""
        asyncio.get_running_loop().call_later(seconds, self.expire)
