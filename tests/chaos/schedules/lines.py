"""Each process's own lines to the key-value store and the messenger, which are the adapters' twins in memory.

A line is slow now and then, as its machine is; it is dead when its process is. While a server is stopped,
calls hang, and what was sent meanwhile is carried out when it goes on, although its caller has given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

from dynaplan.store.memory import MemoryStore
from dynaplan.store.model import Transaction, WatchEvent
from dynaplan.util.errors import DynaplanError, QueueUnavailable, StoreUnavailable
from tests.chaos.schedules.virtual_time import Process
from tests.fakes.clock import LoopClock
from tests.fakes.memory_messenger import MemoryMessenger

EXPIRE_EVERY_S = 0.5
LOOK_AGAIN_S = 0.1


class StoreServer:
    """The store, and the state that its server is in."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.store = MemoryStore(LoopClock())
        self.is_frozen = False
        self.away_since_s: float | None = None
        self.back_s = 0.0
        self._late: list[Callable[[], Awaitable[Any]]] = []
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_there(self) -> bool:
        return self.store.is_available and not self.is_frozen

    def go_away(self, *, by_freezing: bool) -> None:
        self.is_frozen, self.store.is_available = by_freezing, by_freezing
        self.away_since_s = asyncio.get_running_loop().time()

    def come_back(self, *, is_wiped: bool = False) -> None:
        """As etcd does: after a kill every lease has its whole time again, after a stop it has not."""
        loop = asyncio.get_running_loop()
        if not self.store.is_available:
            for lease in self.store._leases.values():
                lease.until_s = loop.time() + lease.ttl_s
        if is_wiped:
            self.store.wipe()
        self.is_frozen, self.store.is_available, self.away_since_s = False, True, None
        self.back_s = loop.time()
        late, self._late = self._late, []
        for call in late:
            task = loop.create_task(_quietly(call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def carry_out_late(self, call: Callable[[], Awaitable[Any]]) -> None:
        """Have a call whose caller has given up carried out when the server goes on."""
        if self.is_frozen and self.dice.random() < 0.5:
            self._late.append(call)

    async def expire(self) -> None:
        """Let leases lapse, for ever."""
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            if self.is_there:
                self.store.expire()


async def _quietly(call: Callable[[], Awaitable[Any]]) -> None:
    try:
        await call()
    except DynaplanError:
        pass


class StoreLine:
    """``ports.stores.Store`` as one process reaches it. ``lag_s`` delays what its watches tell."""

    def __init__(self, server: StoreServer, process: Process) -> None:
        self._server = server
        self._process = process
        self.lag_s = 0.0

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        server = self._server
        if self._process.is_dead:
            raise StoreUnavailable("this process is dead")
        try:
            await asyncio.sleep(server.dice.uniform(0.0002, 0.003))
            while server.is_frozen:
                await asyncio.sleep(LOOK_AGAIN_S)
        except asyncio.CancelledError:
            if not self._process.is_dead:
                server.carry_out_late(call)
            raise
        result = await call()
        if server.dice.random() < 0.002:
            raise StoreUnavailable("the answer was lost")
        return result

    async def get(self, key: str) -> Any:
        return await self._call(lambda: self._server.store.get(key))

    async def list(self, prefix: str) -> Any:
        return await self._call(lambda: self._server.store.list(prefix))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        await self._call(lambda: self._server.store.put(key, value, lease))

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._server.store.delete(key))

    async def commit(self, transaction: Transaction) -> bool:
        return bool(await self._call(lambda: self._server.store.commit(transaction)))

    async def grant(self, ttl_s: int) -> int:
        return int(await self._call(lambda: self._server.store.grant(ttl_s)))

    async def keep_alive(self, lease: int) -> float:
        return float(await self._call(lambda: self._server.store.keep_alive(lease)))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._server.store.revoke(lease))

    async def identity(self) -> str:
        return str(await self._call(self._server.store.identity))

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        while not self._server.is_there:
            await asyncio.sleep(LOOK_AGAIN_S)
        async for event in self._server.store.watch(prefix):
            await asyncio.sleep(self._server.dice.uniform(0.0, 0.005) + self.lag_s)
            while not self._server.is_there:
                await asyncio.sleep(LOOK_AGAIN_S)
            yield event

    async def close(self) -> None:
        """Nothing: its watches end with their tasks."""


class MessengerLine:
    """``ports.messaging.Messenger`` as one process reaches it."""

    def __init__(self, server: MemoryMessenger, process: Process, dice: Random) -> None:
        self._peer = server.peer()
        self._process = process
        self._dice = dice
        process.ends.append(self._drop)

    def _drop(self) -> None:
        self._peer._server.receivers = [
            each for each in self._peer._server.receivers if each[0] is not self._peer
        ]

    async def reach(self) -> None:
        """The way to the server."""
        if self._process.is_dead:
            raise QueueUnavailable("this process is dead")
        await asyncio.sleep(self._dice.uniform(0.0002, 0.003))

    async def publish(self, subject: str, payload: bytes) -> None:
        await self.reach()
        await self._peer.publish(subject, payload)

    async def subscribe(self, subject: str, receive: Callable[[str, bytes], None]) -> None:
        await self.reach()
        process = self._process
        await self._peer.subscribe(subject, lambda subject, payload: process.post(receive, subject, payload))

    async def queue(self, stream: str, taker: str = "") -> QueueLine:
        await self.reach()
        return QueueLine(self, await self._peer.queue(stream, taker))

    async def close(self) -> None:
        await self._peer.close()


class QueueLine:
    """``ports.messaging.WorkQueue`` as one process reaches it."""

    def __init__(self, line: MessengerLine, queue: Any) -> None:
        self._line = line
        self._queue = queue

    async def put(self, payload: bytes) -> int:
        await self._line.reach()
        return int(await self._queue.put(payload))

    async def get(self, timeout_s: float) -> Any:
        await self._line.reach()
        item = await self._queue.get(timeout_s)
        return item and ItemLine(self._line, item)

    async def remove(self, sequence: int) -> None:
        await self._line.reach()
        await self._queue.remove(sequence)

    async def depth(self) -> int:
        await self._line.reach()
        return int(await self._queue.depth())

    async def clear(self) -> None:
        await self._line.reach()
        await self._queue.clear()


class ItemLine:
    """``ports.messaging.WorkItem`` as one process reaches it."""

    def __init__(self, line: MessengerLine, item: Any) -> None:
        self._line = line
        self._item = item
        self.payload = item.payload

    @property
    def deliveries(self) -> int:
        return int(self._item.deliveries)

    async def ack(self) -> None:
        await self._line.reach()
        await self._item.ack()

    async def in_progress(self) -> None:
        await self._line.reach()
        await self._item.in_progress()
