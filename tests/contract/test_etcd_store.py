"""What the key-value store in etcd promises beyond every store's contract: history, endpoints, passwords."""

from __future__ import annotations

import asyncio

import pytest

from dynaplan.store.etcd import EtcdStore, EtcdWatch
from dynaplan.store.etcd_gateway import EtcdGateway, key_range, parse_endpoints
from dynaplan.store.model import Put, WatchEvent
from dynaplan.util.errors import ConfigError, PermanentError
from tests.contract.stores import Watched
from tests.fakes.polling import eventually
from tests.fakes.servers import Server


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
    await store.close()
    await other.close()


async def test_a_quiet_watch_is_opened_anew_without_a_gap_or_a_new_snapshot(shared_etcd: Server) -> None:
    store = EtcdStore.from_environment(shared_etcd.environment)
    gateway = EtcdGateway(parse_endpoints(shared_etcd.environment))
    seen: list[WatchEvent] = []

    async def read() -> None:
        async for event in EtcdWatch(gateway, key_range("quiet/"), store.identity, silence_s=0.02).events():
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
