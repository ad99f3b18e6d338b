"""What a store promises whose server is killed, frozen, wiped or away: one suite for etcd and NATS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.nats_store import NatsStore
from dynaplan.store.port import Store
from dynaplan.util.errors import StoreUnavailable
from tests.contract.stores import EVERY_CHANGE, LACKS, Watched
from tests.fakes.polling import consistently, eventually
from tests.fakes.servers import Server

ANSWER_S = 3.0
"""Seconds in which every call has ended, with an answer or an error."""

STORES: dict[str, Callable[[dict[str, str]], Store]] = {
    "etcd": EtcdStore.from_environment,
    "nats": NatsStore.from_environment,
}

NOWHERE = {"ETCD_ENDPOINTS": "http://127.0.0.1:9", "NATS_SERVER": "nats://127.0.0.1:9"}


@pytest.fixture(params=STORES)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def server(request: pytest.FixtureRequest, backend: str) -> Server:
    """A server of the test's own."""
    server: Server = request.getfixturevalue(backend)
    return server


@pytest.fixture
async def store(server: Server, backend: str) -> AsyncIterator[Store]:
    store = STORES[backend](server.environment)
    yield store
    await store.close()


@pytest.fixture
async def other(server: Server, backend: str) -> AsyncIterator[Store]:
    """Another process' store on the same server."""
    other = STORES[backend](server.environment)
    yield other
    await other.close()


@pytest.fixture
async def watch(store: Store) -> AsyncIterator[Watched]:
    watched = Watched(store, "watched/")
    yield watched


async def test_a_killed_and_restarted_server_keeps_keys_and_leases_and_watches_have_no_gap(
    server: Server, store: Store, other: Store, watch: Watched, backend: str
) -> None:
    await watch.started()
    lease = await store.grant(10)
    await store.put("watched/leased", "0", lease)
    await other.put("watched/gone", "v")
    identity = await store.identity()
    for round_ in range(3):
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.get("watched/leased")
        await server.start_again()
        # Written before the watch can have come back.
        await other.put("watched/k", str(round_))
        await other.delete("watched/gone")
        assert await store.keep_alive(lease) == 10.0
        await watch.reaches({"watched/leased": "0", "watched/k": str(round_)})
    assert await store.identity() == identity
    if EVERY_CHANGE not in LACKS.get(backend, ()):
        assert watch.snapshots == 1
        assert watch.puts == ["0", "v", "0", "1", "2"]


async def test_a_frozen_server_is_an_error_in_time_and_afterwards_the_watch_goes_on(
    server: Server, store: Store, watch: Watched
) -> None:
    await watch.started()
    server.freeze()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    # A write without an answer may still be carried out when the server resumes: it has a key of its own.
    calls = (store.put("watched/unanswered", "v"), store.get("k"), store.list(""), store.grant(10))
    failures = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(failure) for failure in failures] == [StoreUnavailable] * 4
    assert loop.time() - begun_s < ANSWER_S + 1.0
    server.thaw()

    async def put() -> bool:
        try:
            await store.put("watched/k", "after")
        except StoreUnavailable:
            return False
        return True

    await eventually(put)
    await eventually(lambda: watch.state.get("watched/k") == "after")


async def test_a_watch_that_begins_while_the_server_is_away_waits_for_it(
    server: Server, store: Store, other: Store
) -> None:
    await other.put("watched/k", "v")
    server.kill()
    watched = Watched(store, "watched/")
    await consistently(lambda: not watched.events, for_s=0.5)
    await server.start_again()
    await watched.reaches({"watched/k": "v"})


async def test_a_server_that_comes_back_empty_is_noticed(
    server: Server, store: Store, watch: Watched
) -> None:
    for number in range(5):
        await store.put(f"watched/{number}", "v")
    await watch.started()
    lease = await store.grant(10)
    identity = await store.identity()
    server.kill()
    server.wipe()
    await server.start_again()
    assert await store.identity() != identity
    assert await store.keep_alive(lease) == 0.0
    await eventually(lambda: watch.snapshots == 2 and watch.state == {})
    await store.put("watched/new", "v")
    await watch.reaches({"watched/new": "v"})


async def test_a_store_without_its_server_is_an_error_in_time(backend: str) -> None:
    store = STORES[backend](NOWHERE)
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9" if backend == "etcd" else "NATS"):
        await store.get("k")
    assert loop.time() - begun_s < ANSWER_S
    await store.close()
