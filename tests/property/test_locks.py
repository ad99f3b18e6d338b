"""Nobody ever holds a lock beside a writer, whatever delays, faults, deaths and standstills there are."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import looptime
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaplan.store.locks import HeldLock, Locks
from dynaplan.store.memory import MemoryStore
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.store.port import Store
from dynaplan.util.errors import LockLost, LockNotFree, StoreUnavailable
from tests.fakes.clock import LoopClock

TTL_S = 5
KINDS = ("write", "read", "try write", "try read")
FATES = ("well", "well", "well", "dies", "stands still", "loses its key", "is revoked")


class Link:
    """One process's connection to the store: slow, unreliable, and able to stand still or to die.

    As with a real one, a call that fails may have been carried out.
    """

    def __init__(self, store: MemoryStore, dice: random.Random, faults: float) -> None:
        self._store = store
        self._dice = dice
        self._faults = faults
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def _call(self, call: Callable[[], Awaitable[Any]]) -> Any:
        await self._on_the_way()
        if self._dice.random() < self._faults:
            raise StoreUnavailable("lost on the way there")
        answer = await call()
        await self._on_the_way()
        if self._dice.random() < self._faults:
            raise StoreUnavailable("lost on the way back")
        await self.goes_on.wait()
        return answer

    async def _on_the_way(self) -> None:
        await self.goes_on.wait()
        await asyncio.sleep(self._dice.choice([0.0, 0.001, 0.01, 0.3, 1.5]) * self._dice.random())

    async def get(self, key: str) -> KeyValue | None:
        found: KeyValue | None = await self._call(lambda: self._store.get(key))
        return found

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        found: tuple[KeyValue, ...] = await self._call(lambda: self._store.list(prefix))
        return found

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        await self._call(lambda: self._store.put(key, value, lease))

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._store.delete(key))

    async def commit(self, transaction: Transaction) -> bool:
        return bool(await self._call(lambda: self._store.commit(transaction)))

    async def grant(self, ttl_s: int) -> int:
        return int(await self._call(lambda: self._store.grant(ttl_s)))

    async def keep_alive(self, lease: int) -> float:
        return float(await self._call(lambda: self._store.keep_alive(lease)))

    async def revoke(self, lease: int) -> None:
        await self._call(lambda: self._store.revoke(lease))

    async def identity(self) -> str:
        return str(await self._call(self._store.identity))

    async def close(self) -> None:
        pass

    async def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        async for event in self._store.watch(prefix):
            await self._on_the_way()
            yield event


class Box:
    """Processes that take the lock ``x``, and what each of them holds, checked at every step of each."""

    def __init__(self, seed: int, faults: float) -> None:
        self.dice = random.Random(seed)
        self.store = MemoryStore(LoopClock())
        self.faults = faults
        self.held: list[tuple[bool, HeldLock]] = []
        self.writers_fence = 0
        self.acquired = 0

    def check(self) -> None:
        now = self.held = [(is_writer, lock) for is_writer, lock in self.held if lock.is_held]
        writers = [lock for is_writer, lock in now if is_writer]
        assert not writers or len(now) == 1, [lock.key for _, lock in now]

    async def process(self, kind: str, fate: str, hold_s: float) -> None:
        link = Link(self.store, self.dice, self.faults)
        locks = Locks(link, LoopClock(), TTL_S)
        lock = None
        with suppress(StoreUnavailable, LockNotFree):
            lock = await self._acquired(locks, kind)
        if lock:
            self.acquired += 1
            self.held.append((kind.endswith("write"), lock))
            self.check()
            self._look_at_the_fence(kind, lock)
            with suppress(LockLost):
                async with lock:
                    await asyncio.sleep(hold_s)
                    await self._meet(fate, lock, link)
                    self.check()

    async def _acquired(self, locks: Locks, kind: str) -> HeldLock | None:
        if kind.startswith("try"):
            return await (locks.try_write_lock if kind == "try write" else locks.try_read_lock)("x")
        wait = locks.write_lock_with_wait if kind == "write" else locks.read_lock_with_wait
        return await wait("x", timeout_s=self.dice.choice([None, 1.0, 20.0]))

    def _look_at_the_fence(self, kind: str, lock: HeldLock) -> None:
        assert lock.fence > self.writers_fence
        if kind.endswith("write"):
            self.writers_fence = lock.fence

    async def _meet(self, fate: str, lock: HeldLock, link: Link) -> None:
        item = await self.store.get(lock.key)
        if fate in ("dies", "stands still"):
            link.goes_on.clear()
            await asyncio.sleep(self.dice.uniform(0.0, 3 * TTL_S))
            if fate == "stands still":
                link.goes_on.set()
        elif fate == "loses its key":
            await self.store.delete(lock.key)
        elif fate == "is revoked" and item:
            await self.store.revoke(item.lease)
        # What was deleted by a third is known to the holder only when its watch says so.
        if fate in ("loses its key", "is revoked"):
            self.held = [each for each in self.held if each[1] is not lock]


async def live(box: Box, processes: list[tuple[str, str, float, float]]) -> None:
    async def later(kind: str, fate: str, start_s: float, hold_s: float) -> None:
        await asyncio.sleep(start_s)
        await box.process(kind, fate, hold_s)

    async def look() -> None:
        while True:
            await asyncio.sleep(0.25)
            box.store.expire()
            box.check()

    looking = asyncio.create_task(look())
    await asyncio.wait_for(asyncio.gather(*(later(*each) for each in processes)), 3600)
    assert not looking.done(), looking.exception()
    looking.cancel()
    await nobody_is_blocked_for_longer_than_the_ttl(box)


async def nobody_is_blocked_for_longer_than_the_ttl(box: Box) -> None:
    locks = Locks(box.store, LoopClock(), TTL_S)
    async with await locks.write_lock_with_wait("x", timeout_s=3 * TTL_S):
        assert [item.value for item in await box.store.list("v1/")] == ["writing"]


def processes() -> st.SearchStrategy[list[tuple[str, str, float, float]]]:
    times_s = st.floats(0, 5, allow_nan=False)
    return st.lists(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(FATES), times_s, times_s), min_size=2, max_size=6
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), faults=st.sampled_from([0.0, 0.0, 0.02, 0.1]), processes=processes())
def test_nobody_holds_a_lock_beside_a_writer(
    seed: int, faults: float, processes: list[tuple[str, str, float, float]]
) -> None:
    with asyncio.Runner(loop_factory=lambda: looptime.new_event_loop(noop_cycles=1)) as runner:
        runner.run(live(Box(seed, faults), processes))


_: Callable[[Link], Store] = lambda link: link  # noqa: E731  the link is a store, as mypy checks
