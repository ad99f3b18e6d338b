"""An etcd behind TLS, client certificates and passwords: the right ones do, and a wrong one is named."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from dynaplan.fleet.servers import check_external_store
from dynaplan.store.etcd import EtcdStore
from dynaplan.store.model import Put, Snapshot, Transaction, WatchEvent
from dynaplan.util.errors import UserError
from tests.fakes.secured_etcd import SecuredEtcd


@pytest.fixture
async def store(secured_etcd: SecuredEtcd) -> AsyncIterator[EtcdStore]:
    store = EtcdStore.from_environment(secured_etcd.environment)
    yield store
    await store.close()


async def test_keys_leases_and_watches_work_there(store: EtcdStore) -> None:
    lease = await store.grant(10)
    assert await store.commit(Transaction(puts={"/services/ns/a": "1"}, lease=lease))
    events = cast(AsyncGenerator[WatchEvent], store.watch("/services/ns/"))
    first = await anext(events)
    assert isinstance(first, Snapshot)
    assert [item.key for item in first.items] == ["/services/ns/a"]
    await store.put("/services/ns/b", "2")
    assert isinstance(await anext(events), Put)
    assert await store.keep_alive(lease) > 0
    await store.revoke(lease)
    assert [item.key for item in await store.list("/services/ns/")] == ["/services/ns/b"]
    await events.aclose()


async def test_a_change_of_the_users_in_between_costs_nothing(
    store: EtcdStore, secured_etcd: SecuredEtcd
) -> None:
    await store.put("/services/ns/c", "1")
    root = secured_etcd.gateway_of_root()
    await secured_etcd.add_user(root, "one-more", "READ")
    await root.close()
    await store.put("/services/ns/c", "2")
    assert (await store.list("/services/ns/c"))[0].value == "2"


async def test_a_watch_that_ends_leaves_no_connection_whatever_the_server_does(
    secured_etcd: SecuredEtcd,
) -> None:
    store = EtcdStore.from_environment(secured_etcd.environment)
    events = cast(AsyncGenerator[WatchEvent], store.watch("/services/ns/"))
    await anext(events)
    await store.put("/services/ns/d", "1")
    await anext(events)
    with secured_etcd.stopped():
        await events.aclose()
        await store.close()
        assert secured_etcd.connections() == []


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ({"ETCD_AUTH_PASSWORD": "wrong"}, "authentication failed, invalid user ID or password"),
        ({"ETCD_AUTH_USERNAME": "nobody"}, "authentication failed, invalid user ID or password"),
        ({"ETCD_AUTH_USERNAME": ""}, "user name is empty"),
        ({"ETCD_AUTH_USERNAME": "reader"}, "permission denied"),
        ({"ETCD_AUTH_CA": "other.pem"}, "ETCD_AUTH_CA does not vouch for its certificate"),
        ({"ETCD_AUTH_CA": "nowhere.pem"}, "ETCD_AUTH_CA=.*nowhere.pem: No such file or directory"),
        ({"ETCD_AUTH_CA": "other.key"}, "ETCD_AUTH_CA=.*other.key: .*no certificate"),
        ({"ETCD_AUTH_CLIENT_CERT": ""}, "does not take ETCD_AUTH_CLIENT_CERT, or asks for one"),
        (
            {"ETCD_AUTH_CLIENT_CERT": "other.pem", "ETCD_AUTH_CLIENT_KEY": "other.key"},
            "does not take ETCD_AUTH_CLIENT_CERT",
        ),
        ({"ETCD_AUTH_CLIENT_KEY": "other.key"}, "ETCD_AUTH_CLIENT_KEY=.*other.key: .*mismatch"),
        (
            {"ETCD_AUTH_CLIENT_CERT": "named.pem", "ETCD_AUTH_CLIENT_KEY": "named.key"},
            "only client certificates without a CommonName",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
async def test_a_wrong_one_is_named_in_one_sentence(
    secured_etcd: SecuredEtcd, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str], fault: str
) -> None:
    environment = secured_etcd.environment | {
        name: str(secured_etcd.certificates / value) if Path(value).suffix else value
        for name, value in wrong.items()
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=fault) as raised:
        await check_external_store(environment, "ns")
    assert "the right one" not in str(raised.value)
