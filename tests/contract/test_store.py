"""What every key-value store and lease keeper promises, and what the real one promises about outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dynaplan.adapters.clock import SystemClock
from dynaplan.adapters.stores.encoding import key_range
from dynaplan.adapters.stores.etcd import EtcdStore
from dynaplan.adapters.stores.file.store import FileStore
from dynaplan.adapters.stores.gateway import Gateway, endpoints_of
from dynaplan.adapters.stores.memory import MemoryStore
from dynaplan.adapters.stores.watch import Watch
from dynaplan.domain.errors import ConfigError, PermanentError, StoreUnavailable
from dynaplan.domain.wire.store import Deleted, Put, Snapshot, Transaction, WatchEvent
from tests.fakes.polling import consistently, eventually
from tests.fakes.servers import Server, start_etcd

Store = EtcdStore | MemoryStore | FileStore


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_etcd(tmp_path_factory.mktemp("e"))
    yield server
    server.kill()


@pytest.fixture(params=["memory", "etcd", "file"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        store: Store = MemoryStore(SystemClock())
    elif request.param == "file":
        store = FileStore.from_environment({"DYN_FILE_KV": str(tmp_path / "kv")})
    else:
        server: Server = request.getfixturevalue("shared_etcd")
        store = EtcdStore.from_environment(server.environment)
        for item in await store.list(""):
            await store.delete(item.key)
    yield store
    await store.close()


@pytest.fixture
def etcd(runtime_dir: Path) -> Iterator[Server]:
    """One of its own, to be killed."""
    server = start_etcd(runtime_dir)
    yield server
    server.kill()


class Watched:
    """A watch that is being read, and what it has told so far."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.events: list[WatchEvent] = []
        self.task = asyncio.create_task(self._read(store.watch(prefix)))

    async def _read(self, events: AsyncIterator[WatchEvent]) -> None:
        async for event in events:
            self.events.append(event)

    @property
    def state(self) -> dict[str, str]:
        """What a reader that follows the events believes."""
        state: dict[str, str] = {}
        for event in self.events:
            if isinstance(event, Snapshot):
                state = {item.key: item.value for item in event.items}
            elif isinstance(event, Put):
                state[event.item.key] = event.item.value
            else:
                state.pop(event.key, None)
        return state

    @property
    def puts(self) -> list[str]:
        return [event.item.value for event in self.events if isinstance(event, Put)]

    @property
    def snapshots(self) -> int:
        return sum(isinstance(event, Snapshot) for event in self.events)

    async def reaches(self, state: dict[str, str]) -> None:
        await eventually(lambda: self.state == state)

    async def started(self) -> Watched:
        await eventually(lambda: self.snapshots)
        return self

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.fixture
async def watch(store: Store) -> AsyncIterator[Watched]:
    watched = Watched(store, "watched/")
    yield watched
    await watched.stop()


# Keys and values


async def test_a_key_that_was_put_can_be_read(store: Store) -> None:
    await store.put("a/ключ", "значение ✓")
    item = await store.get("a/ключ")
    assert item is not None
    assert (item.key, item.value, item.lease) == ("a/ключ", "значение ✓", 0)
    assert item.revision > 0


async def test_a_key_that_is_absent_is_none(store: Store) -> None:
    assert await store.get("absent") is None


async def test_an_empty_value_is_a_value(store: Store) -> None:
    await store.put("empty", "")
    item = await store.get("empty")
    assert item is not None
    assert item.value == ""


async def test_a_list_holds_the_keys_under_the_prefix_in_key_order(store: Store) -> None:
    for key in ("p/b", "p/a", "p0", "o/z", "p/"):
        await store.put(key, key)
    assert [item.key for item in await store.list("p/")] == ["p/", "p/a", "p/b"]
    assert len(await store.list("")) == 5
    assert await store.list("q") == ()


async def test_a_later_write_has_a_later_revision(store: Store) -> None:
    await store.put("k", "1")
    first = await store.get("k")
    await store.put("k", "2")
    second = await store.get("k")
    assert first is not None
    assert second is not None
    assert second.revision > first.revision


async def test_deleting_twice_is_the_same_as_once(store: Store) -> None:
    await store.put("k", "v")
    await store.delete("k")
    await store.delete("k")
    assert await store.get("k") is None


# Transactions


async def test_a_transaction_writes_and_deletes_everything_when_its_expectation_holds(store: Store) -> None:
    await store.put("old", "v")
    old = await store.get("old")
    assert old is not None
    transaction = Transaction({"old": old.revision, "new": 0}, {"new": "1", "other": "2"}, ("old",))
    assert await store.commit(transaction)
    assert {item.key: item.value for item in await store.list("")} == {"new": "1", "other": "2"}
    assert len({item.revision for item in await store.list("")}) == 1


async def test_a_transaction_writes_nothing_when_its_expectation_fails(store: Store) -> None:
    await store.put("k", "v")
    assert not await store.commit(Transaction({"k": 0}, {"k": "mine", "other": "2"}))
    assert [(item.key, item.value) for item in await store.list("")] == [("k", "v")]


async def test_of_many_that_create_the_same_key_one_wins(store: Store) -> None:
    tries = [store.commit(Transaction({"lock": 0}, {"lock": str(number)})) for number in range(10)]
    assert sorted(await asyncio.gather(*tries)) == [False] * 9 + [True]


async def test_a_transaction_writes_under_its_lease(store: Store) -> None:
    lease = await store.grant(10)
    assert await store.commit(Transaction(puts={"a": "1"}, lease=lease))
    item = await store.get("a")
    assert item is not None
    assert item.lease == lease


# Leases


async def test_a_lease_is_a_positive_number_of_at_most_63_bits(store: Store) -> None:
    leases = [await store.grant(10) for _ in range(3)]
    assert all(0 < lease < 2**63 for lease in leases)
    assert len(set(leases)) == 3


async def test_revoking_a_lease_deletes_its_keys_and_only_those(store: Store) -> None:
    lease = await store.grant(10)
    await store.put("mine", "v", lease)
    await store.put("free", "v")
    await store.revoke(lease)
    assert [item.key for item in await store.list("")] == ["free"]


async def test_revoking_a_lease_twice_is_the_same_as_once(store: Store) -> None:
    lease = await store.grant(10)
    await store.revoke(lease)
    await store.revoke(lease)
    assert await store.keep_alive(lease) == 0.0


async def test_keeping_a_lease_alive_tells_its_time_to_live(store: Store) -> None:
    assert await store.keep_alive(await store.grant(10)) == 10.0


async def test_keeping_alive_a_lease_that_is_gone_is_zero(store: Store) -> None:
    lease = await store.grant(10)
    await store.revoke(lease)
    assert await store.keep_alive(lease) == 0.0
    assert await store.keep_alive(12345) == 0.0


async def test_a_put_under_a_lease_that_is_gone_is_refused_for_good(store: Store) -> None:
    lease = await store.grant(10)
    await store.revoke(lease)
    with pytest.raises(PermanentError):
        await store.put("k", "v", lease)
    with pytest.raises(PermanentError):
        await store.commit(Transaction(puts={"k": "v"}, lease=lease))
    assert await store.get("k") is None


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


async def test_the_identity_stays_the_same(store: Store) -> None:
    assert await store.identity() == await store.identity()


# Watches


async def test_a_watch_begins_with_what_is_there(store: Store) -> None:
    await store.put("watched/a", "1")
    await store.put("other", "2")
    watched = await Watched(store, "watched/").started()
    (snapshot,) = watched.events
    assert isinstance(snapshot, Snapshot)
    assert [(item.key, item.value) for item in snapshot.items] == [("watched/a", "1")]
    await watched.stop()


async def test_a_watch_tells_every_change_in_order(store: Store, watch: Watched) -> None:
    await watch.started()
    for number in range(50):
        await store.put("watched/k", str(number))
    await store.put("unwatched", "v")
    await store.delete("watched/k")
    await eventually(lambda: len(watch.events) == 52)
    assert watch.puts == [str(number) for number in range(50)]
    assert watch.events[-1] == Deleted("watched/k")


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
        await each.stop()


async def test_a_watch_of_large_values_is_whole(store: Store, watch: Watched) -> None:
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
    await watched.stop()
    await store.close()


# Outages of etcd


async def test_a_killed_and_restarted_etcd_keeps_keys_and_leases_and_watches_have_no_gap(
    etcd: Server,
) -> None:
    store, other = EtcdStore.from_environment(etcd.environment), EtcdStore.from_environment(etcd.environment)
    watched = await Watched(store, "watched/").started()
    lease = await store.grant(10)
    await store.put("watched/leased", "0", lease)
    identity = await store.identity()
    for round_ in range(3):
        etcd.kill()
        with pytest.raises(StoreUnavailable):
            await store.get("watched/leased")
        await etcd.start_again()
        # Written before the watch can have come back.
        await other.put("watched/k", str(round_))
        assert await store.keep_alive(lease) == 10.0
        await watched.reaches({"watched/leased": "0", "watched/k": str(round_)})
    assert await store.identity() == identity
    assert watched.snapshots == 1
    assert watched.puts == ["0", "0", "1", "2"]
    await watched.stop()
    await store.close()
    await other.close()


async def test_a_frozen_etcd_is_an_error_in_time_and_afterwards_the_watch_goes_on(etcd: Server) -> None:
    store = EtcdStore.from_environment(etcd.environment)
    watched = await Watched(store, "watched/").started()
    etcd.freeze()
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    with pytest.raises(StoreUnavailable):
        await store.put("watched/k", "during")
    assert loop.time() - begun_s < 4.0
    etcd.thaw()

    async def put() -> bool:
        try:
            await store.put("watched/k", "after")
        except StoreUnavailable:
            return False
        return True

    await eventually(put)
    await eventually(lambda: watched.state.get("watched/k") == "after")
    await watched.stop()
    await store.close()


async def test_a_watch_that_begins_while_etcd_is_away_waits_for_it(etcd: Server) -> None:
    store = EtcdStore.from_environment(etcd.environment)
    await store.put("watched/k", "v")
    etcd.kill()
    watched = Watched(store, "watched/")
    await consistently(lambda: not watched.events, for_s=0.5)
    await etcd.start_again()
    await eventually(lambda: watched.state == {"watched/k": "v"})
    await watched.stop()
    await store.close()


async def test_an_etcd_that_comes_back_empty_is_noticed_by_a_watch(etcd: Server) -> None:
    store = EtcdStore.from_environment(etcd.environment)
    for number in range(5):
        await store.put(f"watched/{number}", "v")
    watched = await Watched(store, "watched/").started()
    lease = await store.grant(10)
    identity = await store.identity()
    etcd.kill()
    etcd.wipe()
    await etcd.start_again()
    assert await store.identity() != identity
    assert await store.keep_alive(lease) == 0.0
    await eventually(lambda: watched.snapshots == 2 and watched.state == {})
    await store.put("watched/new", "v")
    await eventually(lambda: watched.state == {"watched/new": "v"})
    await watched.stop()
    await store.close()


async def test_an_empty_etcd_that_has_overtaken_the_old_revision_is_noticed_by_a_watch(etcd: Server) -> None:
    store, other = EtcdStore.from_environment(etcd.environment), EtcdStore.from_environment(etcd.environment)
    await store.identity()
    await store.put("watched/old", "v")
    watched = await Watched(store, "watched/").started()
    # Away from the watch's point of view only: others are faster.
    watching, store._gateway._endpoints = store._gateway._endpoints, ("http://127.0.0.1:9",)
    etcd.kill()
    etcd.wipe()
    await etcd.start_again()
    await other.identity()
    for number in range(9):
        await other.put(f"watched/{number}", "v")
    store._gateway._endpoints = watching
    await eventually(lambda: watched.state == {f"watched/{number}": "v" for number in range(9)})
    await watched.stop()
    await store.close()
    await other.close()


async def test_a_watch_whose_history_was_compacted_meanwhile_begins_again(etcd: Server) -> None:
    store, other = EtcdStore.from_environment(etcd.environment), EtcdStore.from_environment(etcd.environment)
    watched = await Watched(store, "watched/").started()
    await store.put("watched/gone", "v")
    await eventually(lambda: watched.puts == ["v"])
    # Away from the watch's point of view only: it gets nothing while the history is cut.
    watching, store._gateway._endpoints = store._gateway._endpoints, ("http://127.0.0.1:9",)
    etcd.kill()
    await etcd.start_again()
    await other.delete("watched/gone")
    for number in range(5):
        await other.put("watched/k", str(number))
    last = await other.get("watched/k")
    assert last is not None
    await other._gateway.call("/v3/kv/compaction", {"revision": str(last.revision), "physical": True})
    store._gateway._endpoints = watching
    await eventually(lambda: watched.state == {"watched/k": "4"})
    assert watched.snapshots == 2
    await watched.stop()
    await store.close()
    await other.close()


async def test_a_quiet_watch_is_opened_anew_without_a_gap_or_a_new_snapshot(shared_etcd: Server) -> None:
    store = EtcdStore.from_environment(shared_etcd.environment)
    gateway = Gateway(endpoints_of(shared_etcd.environment))
    seen: list[WatchEvent] = []

    async def read() -> None:
        async for event in Watch(gateway, key_range("quiet/"), store.identity, silence_s=0.02).events():
            seen.append(event)

    reading = asyncio.create_task(read())
    await eventually(lambda: seen)
    for number in range(40):
        await store.put("quiet/k", str(number))
        await asyncio.sleep(0.01 * (number % 4))
    await eventually(lambda: len(seen) == 41)
    assert [event.item.value for event in seen if isinstance(event, Put)] == [str(n) for n in range(40)]
    await gateway.close()
    await reading
    await store.close()


async def test_the_next_endpoint_takes_over_from_one_that_is_away(shared_etcd: Server) -> None:
    away = "unix:///nowhere/localhost:1"
    environment = {"ETCD_ENDPOINTS": f"{away},http://127.0.0.1:9,{shared_etcd.environment['ETCD_ENDPOINTS']}"}
    store = EtcdStore.from_environment(environment)
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    assert "k" in watched.state
    await watched.stop()
    await store.close()


async def test_no_endpoint_at_all_is_an_error_that_names_one() -> None:
    store = EtcdStore.from_environment({"ETCD_ENDPOINTS": "http://127.0.0.1:9"})
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9"):
        await store.get("k")
    await store.close()


@pytest.mark.parametrize("endpoints", ["ftp://x:1", "unix://relative", " , "])
async def test_an_endpoint_that_cannot_be_one_is_the_users_error(endpoints: str) -> None:
    with pytest.raises(ConfigError, match="ETCD_ENDPOINTS"):
        EtcdStore.from_environment({"ETCD_ENDPOINTS": endpoints})


async def test_a_missing_certificate_file_is_the_users_error() -> None:
    with pytest.raises(ConfigError, match="ETCD_AUTH_CA"):
        EtcdStore.from_environment({"ETCD_AUTH_CA": "/nowhere/ca.pem"})


async def test_a_store_behind_a_password_signs_in_and_does_so_again_after_a_restart(etcd: Server) -> None:
    anonymous = EtcdStore.from_environment(etcd.environment)
    call = anonymous._gateway.call
    await call("/v3/auth/user/add", {"name": "root", "password": "secret"})
    await call("/v3/auth/user/grant", {"user": "root", "role": "root"})
    await call("/v3/auth/enable", {})
    with pytest.raises(PermanentError):
        await anonymous.get("k")
    login = {"ETCD_AUTH_USERNAME": "root", "ETCD_AUTH_PASSWORD": "secret"}
    store = EtcdStore.from_environment({**etcd.environment, **login})
    watched = await Watched(store, "k").started()
    await store.put("k", "1")
    etcd.kill()
    await etcd.start_again()
    await store.put("k", "2")
    await eventually(lambda: watched.state == {"k": "2"})
    wrong = EtcdStore.from_environment({**etcd.environment, **login, "ETCD_AUTH_PASSWORD": "guess"})
    with pytest.raises(PermanentError):
        await wrong.get("k")
    await watched.stop()
    for each in (anonymous, store, wrong):
        await each.close()
