from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from dynaplan.store.discovery import Discovery, InstanceQuery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import ConfigError
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


pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

PLACES = [
    ("ns", "backend", "generate"),
    ("ns", "backend", "generate/deep"),
    ("ns", "backend", "status"),
    ("ns", "backend2", "generate"),
    ("ns2", "backend", "generate"),
]


def place(number: int) -> Instance:
    return Instance(*PLACES[number], number + 1, f"http://127.0.0.1:{number}")


@pytest.fixture
async def registry(store: FakeStore) -> FakeStore:
    for number in range(len(PLACES)):
        await store.put(place(number).key, place(number).to_json())
    await store.put("/services/ns/backend/generate/ff", "[]")
    return store


@pytest.mark.parametrize(
    ("query", "numbers"),
    [
        (InstanceQuery(), {0, 1, 2, 3, 4}),
        (InstanceQuery("ns"), {0, 1, 2, 3}),
        (InstanceQuery("ns", "backend"), {0, 1, 2}),
        (InstanceQuery("ns", "backend", "status"), {2}),
        (InstanceQuery("ns", "backend", "generate/deep"), {1}),
        (InstanceQuery("elsewhere"), set()),
    ],
)
async def test_a_query_finds_and_watches_its_instances_and_no_others(
    registry: FakeStore, query: InstanceQuery, numbers: set[int]
) -> None:
    expected = {place(number).key: place(number) for number in numbers}
    assert {each.key: each for each in await query.find(registry)} == expected
    watcher = query.watcher(registry)
    await watcher.start()
    assert watcher.current == expected
    await registry.put(place(2).key, place(2).to_json().replace("127.0.0.1", "127.0.0.2"))
    await asyncio.sleep(0.01)
    assert (watcher.current != expected) == (2 in numbers)
    await watcher.close()


@pytest.mark.parametrize("names", [("", "c"), ("ns", "", "e"), ("", "", "e"), ("a/b",), ("ns", "a/b")])
async def test_a_name_behind_an_empty_one_or_with_a_slash_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        InstanceQuery(*names)
