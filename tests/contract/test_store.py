"""What every store promises beyond the answers that ``test_store_model.py`` compares: order, time, other
clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dynaplan.store.memory import MemoryStore
from dynaplan.store.model import Deleted, Put, Snapshot, Transaction
from dynaplan.store.port import Store
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import StoreUnavailable
from tests.contract.stores import (
    BACKENDS,
    EVERY_CHANGE,
    LACKS,
    LARGE_DATA,
    LEASES_OUTLIVE,
    OTHER_CLIENTS,
    Watched,
)
from tests.fakes.polling import consistently, eventually

Connect = Callable[[], Store]


@pytest.fixture(params=BACKENDS)
async def connect(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Connect]:
    """A way to connect to empty data; what it has made is closed after the test."""
    connect = await BACKENDS[request.param](request, tmp_path)
    made: list[Store] = []

    def connected() -> Store:
        made.append(connect())
        return made[-1]

    yield connected
    for each in made:
        await each.close()


@pytest.fixture
def store(connect: Connect) -> Store:
    return connect()


@pytest.fixture
def lacks(request: pytest.FixtureRequest) -> frozenset[str]:
    """The promises that this backend does not make."""
    return LACKS.get(request.node.callspec.params["connect"], frozenset())


@pytest.fixture
def other(connect: Connect, lacks: frozenset[str]) -> Store:
    """Another client of the same data."""
    if OTHER_CLIENTS in lacks:
        pytest.skip(f"not promised: {OTHER_CLIENTS}")
    return connect()


@pytest.fixture
async def watch(store: Store) -> AsyncIterator[Watched]:
    watched = Watched(store, "watched/")
    yield watched


# Transactions


async def test_of_many_that_create_the_same_key_one_wins(store: Store) -> None:
    tries = [store.commit(Transaction({"lock": 0}, {"lock": str(number)})) for number in range(10)]
    assert sorted(await asyncio.gather(*tries)) == [False] * 9 + [True]


# Leases


async def test_a_lease_that_nobody_keeps_alive_takes_its_keys_with_it(store: Store, watch: Watched) -> None:
    await watch.started()
    lease = await store.grant(2)
    await store.put("watched/k", "v", lease)

    async def is_gone() -> bool:
        return await store.get("watched/k") is None

    await eventually(is_gone, timeout_s=8)
    await eventually(lambda: watch.events[-1] == Deleted("watched/k"))
    assert await store.keep_alive(lease) == 0.0


async def test_a_lease_that_is_kept_alive_lives_on(store: Store) -> None:
    lease = await store.grant(2)
    await store.put("k", "v", lease)

    async def is_kept_alive() -> bool:
        return await store.keep_alive(lease) == 2.0

    await consistently(is_kept_alive, for_s=3.2, interval_s=0.8)
    assert await store.get("k") is not None
    await store.revoke(lease)


# Watches


async def test_a_watch_tells_every_change_in_order(
    store: Store, watch: Watched, lacks: frozenset[str]
) -> None:
    await watch.started()
    for number in range(50):
        await store.put("watched/k", str(number))
    await store.put("unwatched", "v")
    await store.delete("watched/k")
    await eventually(lambda: watch.events[-1] == Deleted("watched/k"))
    if EVERY_CHANGE in lacks:
        assert watch.puts == sorted(set(watch.puts), key=int)
    else:
        assert watch.puts == [str(number) for number in range(50)]
        assert len(watch.events) == 52


async def test_a_watch_tells_revision_and_lease_as_a_read_does(store: Store, watch: Watched) -> None:
    await watch.started()
    lease = await store.grant(10)
    await store.put("watched/k", "v", lease)
    await eventually(lambda: len(watch.events) == 2)
    put = watch.events[-1]
    assert isinstance(put, Put)
    assert put.item == await store.get("watched/k")
    await store.revoke(lease)


async def test_a_watch_tells_the_end_of_every_key_of_a_revoked_lease(store: Store, watch: Watched) -> None:
    await watch.started()
    lease = await store.grant(10)
    keys = {f"watched/{number}" for number in range(5)}
    for key in keys:
        await store.put(key, "v", lease)
    await store.revoke(lease)
    await eventually(lambda: {event.key for event in watch.events if isinstance(event, Deleted)} == keys)


async def test_a_watch_misses_nothing_that_happens_while_it_begins(store: Store) -> None:
    async def write() -> None:
        for number in range(100):
            await store.put(f"watched/{number}", str(number))

    writing = asyncio.create_task(write())
    watched = [Watched(store, "watched/") for _ in range(5)]
    await writing
    expected = {f"watched/{number}": str(number) for number in range(100)}
    for each in watched:
        await each.reaches(expected)
        assert each.snapshots == 1
        await each.stop()


async def test_a_watch_tells_of_all_that_was_written_before_it_began(store: Store, other: Store) -> None:
    """Also where the process follows the store already, and lags behind it."""
    followed = await Watched(store, "").started()
    for number in range(50):
        await other.put(f"watched/{number}", "")
        first = await anext(store.watch("watched/"))
        assert isinstance(first, Snapshot)
        assert len(first.items) == number + 1
    await followed.stop()


async def test_a_watch_of_large_values_is_whole(store: Store, watch: Watched, lacks: frozenset[str]) -> None:
    if LARGE_DATA in lacks:
        pytest.skip(f"not promised: {LARGE_DATA}")
    await watch.started()
    text = "x" * 500_000
    for number in range(4):
        await store.put(f"watched/{number}", text)
    await eventually(lambda: len(watch.puts) == 4)
    assert all(value == text for value in watch.puts)


async def test_closing_the_store_ends_its_watches_and_fails_its_calls(store: Store, watch: Watched) -> None:
    await watch.started()
    await store.close()
    await asyncio.wait_for(watch.task, 5)
    with pytest.raises(StoreUnavailable):
        await store.get("k")


async def test_a_watch_can_be_left_at_any_time(store: Store) -> None:
    await store.put("watched/a", "1")
    async for event in store.watch("watched/"):
        assert isinstance(event, Snapshot)
        break


async def test_a_watch_that_begins_while_the_only_other_one_is_left_misses_nothing(store: Store) -> None:
    for number in range(20):
        first = await Watched(store, "watched/").started()
        second = Watched(store, "watched/")
        for _ in range(number % 5):
            await asyncio.sleep(0)
        await first.stop()
        await second.started()
        await store.put("watched/k", str(number))
        await second.reaches({"watched/k": str(number)})
        assert (await store.get("watched/k")).value == str(number)  # type: ignore[union-attr]
        await second.stop()


# Bytes that are no text, and keys of any form


async def test_bytes_that_are_no_text_survive(store: Store, watch: Watched) -> None:
    text = bytes(range(256)).decode(errors="surrogateescape")
    await watch.started()
    await store.put("watched/k", text)
    item = await store.get("watched/k")
    assert item is not None
    assert item.value.encode(errors="surrogateescape") == bytes(range(256))
    await watch.reaches({"watched/k": text})


KEYS = (
    "/",
    "//",
    "/a",
    "a",
    "a/",
    "a/b",
    "a//b",
    ".",
    "..",
    "../../up",
    "v1/../x",
    "v1/./x",
    "v1/y/z",
    "a b",
)
ODD_KEYS = (*KEYS, "%2F", "a\nb", "-", "*", ">", "$", "ж" * 300)


async def test_any_text_can_be_a_key(store: Store, watch: Watched) -> None:
    await watch.started()
    for key in ODD_KEYS:
        await store.put(key, f"value of {key}")
        await store.put(f"watched/{key}", key)
    await watch.reaches({f"watched/{key}": key for key in ODD_KEYS})
    values = {item.key: item.value for item in await store.list("")}
    assert {key: values.get(key) for key in ODD_KEYS} == {key: f"value of {key}" for key in ODD_KEYS}
    for key in ODD_KEYS:
        await store.delete(key)
        assert await store.get(key) is None
    assert len(await store.list("watched/")) == len(ODD_KEYS)


# Several clients


async def test_of_many_clients_that_count_in_two_keys_none_loses_an_update(
    store: Store, other: Store
) -> None:
    await store.commit(Transaction(puts={"count/a": "0", "count/b": "0"}))

    async def count(client: Store) -> None:
        done = 0
        while done < 25:
            a, b = await client.list("count/")
            assert a.value == b.value
            more = str(int(a.value) + 1)
            expected = {a.key: a.revision, b.key: b.revision}
            done += await client.commit(Transaction(expected, {a.key: more, b.key: more}))

    await asyncio.gather(*(count(client) for client in (store, other)))
    assert [item.value for item in await store.list("count/")] == ["50", "50"]


async def test_a_lease_lives_on_when_its_client_has_closed_the_store(
    connect: Connect, store: Store, lacks: frozenset[str]
) -> None:
    if LEASES_OUTLIVE in lacks:
        pytest.skip(f"not promised: {LEASES_OUTLIVE}")
    lease = await store.grant(10)
    await store.put("k", "v", lease)
    await store.close()
    assert await connect().get("k") is not None


# Outages of the memory store


async def test_the_memory_store_can_be_away_and_can_come_back_empty() -> None:
    store = MemoryStore(SystemClock())
    watched = await Watched(store, "").started()
    await store.put("k", "v")
    identity = await store.identity()
    store.is_available = False
    with pytest.raises(StoreUnavailable):
        await store.get("k")
    store.wipe()
    store.is_available = True
    assert await store.get("k") is None
    assert await store.identity() != identity
    await eventually(lambda: watched.snapshots == 2)
    await store.close()
