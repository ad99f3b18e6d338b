from __future__ import annotations

import asyncio

import pytest

from dynaplan.store.coordination.instance_query import InstanceQuery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import ConfigError
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

PLACES = [
    ("ns", "backend", "generate"),
    ("ns", "backend", "generate/deep"),
    ("ns", "backend", "status"),
    ("ns", "backend2", "generate"),
    ("ns2", "backend", "generate"),
]


def instance(number: int) -> Instance:
    return Instance(*PLACES[number], number + 1, f"http://127.0.0.1:{number}")


@pytest.fixture
async def registered(store: FakeStore) -> FakeStore:
    for number in range(len(PLACES)):
        await store.put(instance(number).key, instance(number).to_json())
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
    registered: FakeStore, query: InstanceQuery, numbers: set[int]
) -> None:
    expected = {instance(number).key: instance(number) for number in numbers}
    assert {each.key: each for each in await query.find(registered)} == expected
    watcher = query.watcher(registered)
    await watcher.start()
    assert watcher.current == expected
    await registered.put(instance(2).key, instance(2).to_json().replace("127.0.0.1", "127.0.0.2"))
    await asyncio.sleep(0.01)
    assert (watcher.current != expected) == (2 in numbers)
    await watcher.close()


@pytest.mark.parametrize("names", [("", "c"), ("ns", "", "e"), ("", "", "e"), ("a/b",), ("ns", "a/b")])
async def test_a_name_behind_an_empty_one_or_with_a_slash_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        InstanceQuery(*names)
