"""A key-value store with leases in memory, on the time of the running event loop.

It copies what etcd does: a lease that is not renewed lapses after its TTL and takes its keys along; a
revoked one does so at once; keep-alive of a lease that is gone answers 0; a key under such a lease is
refused; while it is away every call fails, no lease lapses and watches wait; when it is back, leases
have their full TTL again; one that came back empty has another identity and shows an empty snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, Transaction, WatchEvent
from dynaplan.util.errors import PermanentError, StoreUnavailable

FROZEN_S = 3600.0
"""Longer than any patience, on a loop whose time is virtual."""


class FakeStore:
    def __init__(self) -> None:
        self.items: dict[str, KeyValue] = {}
        self.leases: dict[int, asyncio.TimerHandle] = {}
        self.ttl_s: dict[int, float] = {}
        self.is_away = False
        self.is_frozen = False
        self.generation = 1
        self.granted = 0
        self.keep_alives = 0
        self._watches: list[tuple[str, asyncio.Queue[WatchEvent]]] = []

    # how a test steers it

    def go_away(self) -> None:
        self.is_away = True
        for timer in self.leases.values():
            timer.cancel()

    def come_back(self) -> None:
        self.is_away = False
        for lease in self.leases:
            self._start_timer(lease)

    def come_back_empty(self) -> None:
        self.items.clear()
        self.leases.clear()
        self.generation += 1
        self.is_away = False
        for _, queue in self._watches:
            queue.put_nowait(Snapshot(()))

    # KeyValueStore

    async def get(self, key: str) -> KeyValue | None:
        await self._answer()
        return self.items.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        await self._answer()
        return tuple(item for key, item in sorted(self.items.items()) if key.startswith(prefix))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        await self.commit(Transaction(puts={key: value}, lease=lease))

    async def delete(self, key: str) -> None:
        await self._answer()
        self._remove(key)

    async def commit(self, transaction: Transaction) -> bool:
        await self._answer()
        if transaction.lease and transaction.lease not in self.leases:
            raise PermanentError("requested lease not found")
        for key, value in transaction.puts.items():
            self.items[key] = KeyValue(key, value, 1, transaction.lease)
            self._tell(key, Put(self.items[key]))
        for key in transaction.deletes:
            self._remove(key)
        return True

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        queue: asyncio.Queue[WatchEvent] = asyncio.Queue()
        self._watches.append((prefix, queue))
        while self.is_away:
            await asyncio.sleep(0.01)
        yield Snapshot(tuple(item for key, item in sorted(self.items.items()) if key.startswith(prefix)))
        while True:
            yield await queue.get()

    # LeaseStore

    async def grant(self, ttl_s: int) -> int:
        await self._answer()
        self.granted += 1
        lease = 1000 + self.granted
        self.ttl_s[lease] = ttl_s
        self._start_timer(lease)
        return lease

    async def keep_alive(self, lease: int) -> float:
        await self._answer()
        self.keep_alives += 1
        if lease not in self.leases:
            return 0.0
        self._start_timer(lease)
        return self.ttl_s[lease]

    async def revoke(self, lease: int) -> None:
        await self._answer()
        self._end(lease)

    async def identity(self) -> str:
        await self._answer()
        return f"generation {self.generation}"

    # inside

    async def _answer(self) -> None:
        await asyncio.sleep(0.001)
        if self.is_frozen:
            await asyncio.sleep(FROZEN_S)
        if self.is_away:
            raise StoreUnavailable("away")

    def _start_timer(self, lease: int) -> None:
        if lease in self.leases:
            self.leases[lease].cancel()
        loop = asyncio.get_running_loop()
        self.leases[lease] = loop.call_later(self.ttl_s[lease], self._end, lease)

    def _end(self, lease: int) -> None:
        timer = self.leases.pop(lease, None)
        if timer:
            timer.cancel()
        for key in [key for key, item in self.items.items() if item.lease == lease]:
            self._remove(key)

    def _remove(self, key: str) -> None:
        if self.items.pop(key, None):
            self._tell(key, Deleted(key))

    def _tell(self, key: str, event: WatchEvent) -> None:
        for prefix, queue in self._watches:
            if key.startswith(prefix):
                queue.put_nowait(event)
