"""What buckets and locks promise on every key-value store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from dynaplan.store.buckets import Bucket, BucketChange, BucketEntry
from dynaplan.store.locks import Locks
from dynaplan.store.port import Store
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, LockLost, LockNotFree
from tests.fakes.polling import consistently, eventually

BYTES = bytes(range(256)) + "значение ✓".encode()
TTL_S = 2


@pytest.fixture
def bucket(store: Store) -> Bucket:
    return Bucket(store, "v1/things")


@pytest.fixture
def locks(store: Store) -> Locks:
    return Locks(store, SystemClock(), TTL_S)


# Buckets


async def test_bytes_come_back_as_they_were(bucket: Bucket, store: Store) -> None:
    lease = await store.grant(10)
    await bucket.put("a/b", BYTES, lease)
    await bucket.put("empty", b"")
    found = await bucket.get("a/b")
    assert found is not None
    assert (found.value, found.lease) == (BYTES, lease)
    assert {key: entry.value for key, entry in (await bucket.list()).items()} == {"a/b": BYTES, "empty": b""}
    assert await Bucket(store, "v1/other").list() == {}
    await bucket.delete("a/b")
    assert await bucket.get("a/b") is None


async def test_a_key_is_created_once_and_replaced_only_as_it_was_read(bucket: Bucket) -> None:
    assert await bucket.create("k", b"1")
    assert not await bucket.create("k", b"2")
    entry = await bucket.get("k")
    assert entry is not None
    assert await bucket.replace("k", b"3", entry.revision)
    assert not await bucket.replace("k", b"4", entry.revision)
    entry = await bucket.get("k")
    assert entry is not None
    assert entry.value == b"3"


async def test_a_key_that_was_deleted_and_created_again_has_a_later_revision(bucket: Bucket) -> None:
    revisions = []
    for _ in range(3):
        assert await bucket.create("k", b"")
        entry = await bucket.get("k")
        assert entry is not None
        revisions.append(entry.revision)
        await bucket.delete("k")
    assert revisions == sorted(set(revisions))


async def test_a_watch_of_a_bucket_tells_all_entries_and_then_every_change(bucket: Bucket) -> None:
    await bucket.put("a", b"1")
    told: list[Mapping[str, BucketEntry] | BucketChange] = []

    async def read() -> None:
        async for each in bucket.watch():
            told.append(each)

    reading = asyncio.create_task(read())
    await eventually(lambda: told)
    await bucket.put("b", BYTES)
    await bucket.delete("a")
    await eventually(lambda: len(told) == 3)
    snapshot, put, deleted = told
    assert isinstance(snapshot, dict)
    assert snapshot["a"].value == b"1"
    assert isinstance(put, BucketChange)
    assert put == BucketChange("b", await bucket.get("b"))
    assert deleted == BucketChange("a", None)
    reading.cancel()


async def test_an_empty_name_is_refused(store: Store, bucket: Bucket) -> None:
    for name in ("", "/a", "a/", "a//b"):
        with pytest.raises(ConfigError):
            Bucket(store, name)
    with pytest.raises(ConfigError):
        await bucket.put("", b"")


# Locks


async def test_writers_exclude_everybody_and_readers_exclude_writers(locks: Locks, store: Store) -> None:
    async with await locks.write_lock_with_wait("x") as writer:
        item = await store.get("v1/x/writer")
        assert item is not None
        assert (item.value, item.revision) == ("writing", writer.fence)
        assert await locks.try_write_lock("x") is None
        assert await locks.try_read_lock("x") is None
        with pytest.raises(LockNotFree):
            await locks.read_lock_with_wait("x", timeout_s=0.1)
    first, second = await locks.try_read_lock("x"), await locks.try_read_lock("x")
    assert first
    assert second
    assert first.fence > writer.fence
    assert await locks.try_write_lock("x") is None
    assert {item.key for item in await store.list("v1/x/")} == {first.key, second.key}
    waiting = asyncio.create_task(locks.write_lock_with_wait("x"))
    await first.release()
    await consistently(lambda: not waiting.done(), for_s=0.2)
    await second.release()
    async with await waiting as writer:
        assert writer.fence > second.fence
    assert await store.list("v1/x/") == ()


async def test_of_many_writers_one_at_a_time_holds_the_lock_with_rising_fences(locks: Locks) -> None:
    fences: list[int] = []
    inside = 0

    async def write() -> None:
        nonlocal inside
        async with await locks.write_lock_with_wait("x") as lock:
            inside += 1
            assert inside == 1
            fences.append(lock.fence)
            await asyncio.sleep(0.01)
            inside -= 1

    await asyncio.gather(*(write() for _ in range(8)))
    assert fences == sorted(set(fences))


async def test_a_holder_that_keeps_its_lease_no_more_blocks_nobody_for_longer_than_its_ttl(
    locks: Locks, store: Store
) -> None:
    lease = await store.grant(TTL_S)
    assert await store.keep_alive(lease)
    await store.put("v1/x/writer", "writing", lease)
    reader = await locks.read_lock_with_wait("x", timeout_s=4 * TTL_S)
    assert reader.is_held
    await reader.release()


async def test_a_lock_is_kept_beyond_its_ttl_and_its_loss_is_told(locks: Locks, store: Store) -> None:
    with pytest.raises(LockLost):
        async with await locks.write_lock_with_wait("x") as lock:
            await consistently(lambda: lock.is_held, for_s=1.5 * TTL_S)
            await store.delete("v1/x/writer")
            await eventually(lambda: lock.lost.is_set() and not lock.is_held)
