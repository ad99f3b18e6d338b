from __future__ import annotations

import asyncio

import pytest

from dynaplan.store.locks import Locks
from dynaplan.store.memory import MemoryStore
from dynaplan.util.errors import ConfigError, LockLost, LockNotFree, StoreUnavailable
from tests.fakes.clock import LoopClock

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


@pytest.fixture
def store(clock: LoopClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
def locks(store: MemoryStore, clock: LoopClock) -> Locks:
    return Locks(store, clock)


def keys(store: MemoryStore) -> dict[str, str]:
    return {key: item.value for key, item in store.items.items()}


async def test_the_keys_are_those_of_the_original_and_live_under_a_lease(
    store: MemoryStore, locks: Locks
) -> None:
    async with await locks.write_lock_with_wait("models/llama") as lock:
        assert keys(store) == {"v1/models/llama/writer": "writing"}
        assert lock.key == "v1/models/llama/writer"
    assert keys(store) == {}
    async with await locks.read_lock_with_wait("x") as lock:
        ((key, value),) = keys(store).items()
        item = await store.get(key)
        assert item is not None
        assert (key, value) == (f"v1/x/readers/{item.lease:x}", "reading")
    assert keys(store) == {}


async def test_a_writer_excludes_everybody_and_readers_exclude_writers_only(locks: Locks) -> None:
    writer = await locks.try_write_lock("x")
    assert writer is not None
    assert await locks.try_write_lock("x") is None
    assert await locks.try_read_lock("x") is None
    assert await locks.try_write_lock("y") is not None
    await writer.release()
    readers = [await locks.try_read_lock("x") for _ in range(3)]
    assert all(each and each.is_held for each in readers)
    assert await locks.try_write_lock("x") is None
    assert await locks.try_read_lock("x") is not None, "a try that failed leaves nothing behind"


async def test_waiting_ends_when_the_lock_is_released(locks: Locks, clock: LoopClock) -> None:
    writer = await locks.write_lock_with_wait("x")
    waiting = [asyncio.create_task(locks.read_lock_with_wait("x")) for _ in range(3)]
    await asyncio.sleep(60)
    assert not any(each.done() for each in waiting)
    released_s = clock.now_s()
    await writer.release()
    readers = await asyncio.gather(*waiting)
    assert all(each.is_held for each in readers)
    assert clock.now_s() - released_s < 0.1
    next_writer = asyncio.create_task(locks.write_lock_with_wait("x"))
    for each in readers:
        await asyncio.sleep(20)
        assert not next_writer.done()
        await each.release()
    assert (await next_writer).is_held


async def test_who_gives_up_at_any_moment_of_a_change_does_not_go_on_waiting(
    store: MemoryStore, locks: Locks
) -> None:
    writer = await locks.write_lock_with_wait("x")
    for steps in range(12):
        waiting = asyncio.create_task(locks.write_lock_with_wait("x"))
        await asyncio.sleep(1)
        await store.put("v1/x/readers/note", f"{steps}")  # a change that frees nothing
        for _ in range(steps):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting}, timeout=1)
        assert waiting.cancelled(), f"after {steps} steps"
        await store.delete("v1/x/readers/note")
    await writer.release()


async def test_a_waiting_writer_keeps_new_readers_out(locks: Locks) -> None:
    reader = await locks.read_lock_with_wait("x")
    writing = asyncio.create_task(locks.write_lock_with_wait("x"))
    await asyncio.sleep(1)
    assert await locks.try_read_lock("x") is None
    reading = asyncio.create_task(locks.read_lock_with_wait("x"))
    await asyncio.sleep(1)
    await reader.release()
    writer = await writing
    assert not reading.done()
    await writer.release()
    assert (await reading).is_held


async def test_a_wait_ends_at_its_timeout_and_leaves_nothing_behind(
    store: MemoryStore, locks: Locks, clock: LoopClock
) -> None:
    reader = await locks.read_lock_with_wait("x")
    with pytest.raises(LockNotFree, match="x was not free within 5 s"):
        await locks.write_lock_with_wait("x", timeout_s=5)
    assert clock.now_s() == pytest.approx(5, abs=0.1)
    assert list(keys(store)) == [reader.key]
    assert await locks.try_read_lock("x") is not None


async def test_a_cancelled_wait_leaves_nothing_behind(store: MemoryStore, locks: Locks) -> None:
    reader = await locks.read_lock_with_wait("x")
    waiting = asyncio.create_task(locks.write_lock_with_wait("x"))
    await asyncio.sleep(1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert list(keys(store)) == [reader.key]


async def test_each_later_writer_has_a_higher_fence_and_a_reader_one_between(locks: Locks) -> None:
    fences = []
    for lock in (locks.try_write_lock, locks.try_read_lock, locks.try_write_lock, locks.try_write_lock):
        held = await lock("x")
        assert held is not None
        fences.append(held.fence)
        await held.release()
    assert fences == sorted(set(fences))


async def test_a_lock_is_kept_for_as_long_as_it_is_held(locks: Locks) -> None:
    async with await locks.write_lock_with_wait("x") as lock:
        await asyncio.sleep(3600)
        assert lock.is_held
        assert await locks.try_read_lock("x") is None


async def test_releasing_twice_is_the_same_as_once(locks: Locks) -> None:
    async with await locks.write_lock_with_wait("x") as lock:
        await lock.release()
        await lock.release()
        assert not lock.is_held
        async with await locks.write_lock_with_wait("x") as other:
            await lock.release()
            assert other.is_held
    assert not lock.lost.is_set()


async def test_a_holder_whose_lease_was_revoked_is_told(store: MemoryStore, locks: Locks) -> None:
    lock = await locks.write_lock_with_wait("x")
    with pytest.raises(LockLost):
        async with lock:
            item = await store.get(lock.key)
            assert item is not None
            await store.revoke(item.lease)
            await asyncio.wait_for(lock.lost.wait(), 0.1)
            assert not lock.is_held
            assert await locks.try_write_lock("x") is not None
    assert keys(store), "the other's key is still there"


async def test_a_holder_whose_key_was_deleted_or_taken_by_another_is_told(
    store: MemoryStore, locks: Locks
) -> None:
    lock = await locks.write_lock_with_wait("x")
    await store.delete(lock.key)
    await asyncio.wait_for(lock.lost.wait(), 0.1)
    second = await locks.write_lock_with_wait("x")
    await store.put(second.key, "writing", await store.grant(30))
    await asyncio.wait_for(second.lost.wait(), 0.1)
    assert not second.is_held


async def test_a_holder_that_does_not_reach_the_store_has_lost_its_lock_before_another_gets_it(
    store: MemoryStore, locks: Locks, clock: LoopClock
) -> None:
    lock = await locks.write_lock_with_wait("x")
    store.is_available = False
    await asyncio.wait_for(lock.lost.wait(), 10.1)
    assert not lock.is_held
    store.is_available = True
    assert (await locks.write_lock_with_wait("x")).is_held


async def test_an_error_in_the_block_is_not_covered_by_the_loss(store: MemoryStore, locks: Locks) -> None:
    with pytest.raises(KeyError):
        async with await locks.write_lock_with_wait("x") as lock:
            await store.delete(lock.key)
            await lock.lost.wait()
            raise KeyError


async def test_waiting_outlasts_an_outage_and_a_loss_of_the_own_key(store: MemoryStore, locks: Locks) -> None:
    reader = await locks.read_lock_with_wait("x")
    waiting = asyncio.create_task(locks.write_lock_with_wait("x"))
    await asyncio.sleep(1)
    await store.delete("v1/x/writer")
    store.is_available = False
    await asyncio.sleep(30)
    store.is_available = True
    await asyncio.sleep(5)
    await reader.release()
    assert (await asyncio.wait_for(waiting, 15)).is_held


async def test_trying_says_that_the_store_is_away(store: MemoryStore, locks: Locks) -> None:
    store.is_available = False
    with pytest.raises(StoreUnavailable):
        await locks.try_write_lock("x")
    with pytest.raises(StoreUnavailable):
        await locks.try_read_lock("x")


async def test_waiting_ends_with_the_store(store: MemoryStore, locks: Locks) -> None:
    await locks.write_lock_with_wait("x")
    waiting = asyncio.create_task(locks.read_lock_with_wait("x"))
    await asyncio.sleep(1)
    await store.close()
    with pytest.raises(StoreUnavailable):
        await waiting


@pytest.mark.parametrize("prefix", ["", "/x", "x/", "a//b", "a/readers", "readers/a", "a/writer/b"])
async def test_a_prefix_whose_keys_would_be_anothers_is_refused(locks: Locks, prefix: str) -> None:
    with pytest.raises(ConfigError):
        await locks.try_write_lock(prefix)
