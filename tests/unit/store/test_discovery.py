from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def instance(number: int, component: str = "VllmWorker") -> Instance:
    return Instance("ns", component, "generate", number, f"http://127.0.0.1:{number}")


async def put(store: FakeStore, *instances: Instance) -> None:
    for each in instances:
        await store.put(each.key, each.to_json())
    await asyncio.sleep(0.01)


async def test_it_knows_what_was_there_before_and_what_comes_later(store: FakeStore) -> None:
    await put(store, instance(2))
    discovery = Discovery(store, "ns")
    await discovery.start()
    assert discovery.instances("VllmWorker") == (instance(2),)
    await put(store, instance(1), instance(3, "PrefillWorker"))
    assert discovery.instances("VllmWorker") == (instance(1), instance(2))
    assert discovery.instances("PrefillWorker") == (instance(3, "PrefillWorker"),)
    assert discovery.instances("VllmWorker", "other") == ()
    assert len(discovery.all()) == 3
    await discovery.close()


async def test_changes_are_told_and_a_repetition_is_not(store: FakeStore) -> None:
    discovery = Discovery(store, "ns")
    await discovery.start()
    seen: list[int] = []
    discovery.on_change(lambda: seen.append(len(discovery.all())))
    await put(store, instance(1))
    await put(store, instance(1))
    await store.delete(instance(1).key)
    await asyncio.sleep(0.01)
    assert seen == [1, 0]
    await discovery.close()


async def test_an_outage_keeps_the_known_instances_and_a_new_snapshot_replaces_them(store: FakeStore) -> None:
    await put(store, instance(1))
    discovery = Discovery(store, "ns")
    await discovery.start()
    store.go_away()
    await asyncio.sleep(60)
    assert discovery.instances("VllmWorker") == (instance(1),)
    store.come_back_empty()
    await asyncio.sleep(0.01)
    assert discovery.all() == ()
    await discovery.close()


async def test_a_value_that_is_no_registration_is_ignored(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    for value in ("", "[]", "{}", '"text"', '{"namespace": "ns"}'):
        await store.put("/services/ns/VllmWorker/generate/1", value)
    await put(store, instance(2))
    discovery = Discovery(store, "ns")
    await discovery.start()
    assert discovery.all() == (instance(2),)
    assert "not a registration" in caplog.text
    await discovery.close()


async def test_an_instance_that_is_not_reached_over_http_is_left_out_and_named_once(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = json.loads(instance(1).to_json()) | {"transport": {"tcp": "10.0.0.7:4000"}}
    discovery = Discovery(store, "ns")
    await discovery.start()
    for _ in range(2):
        await store.put(instance(1).key, json.dumps(foreign))
        await put(store, instance(2))
    assert discovery.instances("VllmWorker") == discovery.all() == (instance(2),)
    (message,) = caplog.messages
    assert instance(1).key in message
    assert "tcp 10.0.0.7:4000" in message
    await discovery.close()


async def test_starting_waits_for_a_store_that_is_away(store: FakeStore) -> None:
    store.go_away()
    discovery = Discovery(store, "ns")
    starting = asyncio.create_task(discovery.start())
    await asyncio.sleep(60)
    assert not starting.done()
    store.come_back()
    await asyncio.wait_for(starting, 1)
    await discovery.close()


async def test_instances_on_the_loopback_of_another_host_are_left_out_and_named_once(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    near = replace(instance(1), network="here")
    far = replace(instance(2), network="there", host="gpu2")
    reached = replace(far, instance_id=3, url="http://10.0.0.2:9")
    await put(store, near, far, reached, instance(4))
    discovery = Discovery(store, "ns", "here")
    await discovery.start()
    await put(store, far)
    assert discovery.all() == (near, reached, instance(4))
    (record,) = caplog.records
    assert "only that host reaches http://127.0.0.1:2 of gpu2; --advertise-host" in record.message
    await discovery.close()
