from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dynaplan.store.model import KeyValue
from dynaplan.store.prefix_watcher import (
    PrefixWatcher,
    full_key_string,
    key_string,
    lease_id,
    value_string,
    watch_prefix_with_extraction,
)
from dynaplan.util.documents import whole_number
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def number(item: KeyValue) -> int:
    found = whole_number(item.value)
    if found is None:
        raise ValueError(f"{item.value!r} is no number")
    return found


async def put(store: FakeStore, lease: int = 0, **values: str) -> None:
    for name, value in values.items():
        await store.put(f"p/{name}", value, lease)
    await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (lease_id, {1001: "1"}),
        (key_string, {"a": "1"}),
        (full_key_string, {"p/a": "1"}),
    ],
)
async def test_the_mapping_has_the_extracted_keys(
    store: FakeStore, key: Callable[[KeyValue, str], Any], expected: dict[Any, str]
) -> None:
    await put(store, await store.grant(10), a="1")
    watcher = await watch_prefix_with_extraction(store, "p/", key=key, value=value_string)
    assert watcher.current == expected
    await watcher.close()


async def test_the_mapping_follows_writes_and_deletions_in_key_order(store: FakeStore) -> None:
    await put(store, b="1")
    watcher = await watch_prefix_with_extraction(store, "p/", key=key_string, value=number)
    before = watcher.current
    await put(store, a="2", b="3")
    assert list(watcher.current.items()) == [("a", 2), ("b", 3)]
    assert before == {"b": 1}, "an earlier mapping stays as it was"
    await store.delete("p/b")
    await store.delete("p/b")
    await asyncio.sleep(0.01)
    assert watcher.current == {"a": 2}
    await watcher.close()


async def test_a_value_that_cannot_be_read_is_logged_once_and_skipped(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = await watch_prefix_with_extraction(store, "p/", key=key_string, value=number)
    for _ in range(3):
        await put(store, a="x")
    await put(store, b="1")
    assert watcher.current == {"b": 1}
    await put(store, b="x")
    assert watcher.current == {"b": 1}, "what it held before stays"
    await put(store, a="y", b="2")
    assert watcher.current == {"b": 2}
    assert caplog.messages == [
        "ignoring p/a: 'x' is no number",
        "ignoring p/b: 'x' is no number",
        "ignoring p/a: 'y' is no number",
    ]
    await watcher.close()


async def test_a_key_without_a_lease_has_no_lease_id(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    await put(store, a="1")
    watcher = await watch_prefix_with_extraction(store, "p/", key=lease_id, value=value_string)
    assert watcher.current == {}
    assert caplog.messages == ["ignoring p/a: it lives under no lease"]
    await watcher.close()


async def test_of_several_keys_that_are_extracted_to_one_the_last_counts_and_the_others_step_in(
    store: FakeStore,
) -> None:
    lease = await store.grant(100)
    watcher = await watch_prefix_with_extraction(store, "p/", key=lease_id, value=value_string)
    await put(store, lease, b="second", a="first")
    assert watcher.current == {lease: "second"}
    await store.delete("p/b")
    await asyncio.sleep(0.01)
    assert watcher.current == {lease: "first"}
    await watcher.close()


async def test_the_first_snapshot_and_every_change_are_told_and_a_repetition_is_not(store: FakeStore) -> None:
    seen: list[dict[str, int]] = []
    snapshots: list[int] = []
    watcher = PrefixWatcher(store, "p/", key_string, number)
    watcher.on_change(lambda: seen.append(dict(watcher.current)))
    watcher.on_snapshot(lambda: snapshots.append(len(seen)))
    assert not watcher.has_synced
    await watcher.start()
    assert watcher.has_synced
    await put(store, a="1")
    await put(store, a="1")
    store.come_back_empty()
    store.come_back_empty()
    await asyncio.sleep(0.01)
    assert seen == [{}, {"a": 1}, {}]
    assert snapshots == [0, 2, 3], "a snapshot is told before the change that it brings"
    await watcher.close()


async def test_starting_waits_for_a_store_and_closing_leaves_the_mapping(
    store: FakeStore,
) -> None:
    await put(store, a="1")
    store.go_away()
    watcher = PrefixWatcher(store, "p/", key_string, number)
    starting = asyncio.create_task(watcher.start())
    await asyncio.sleep(60)
    assert not starting.done()
    store.come_back()
    await asyncio.wait_for(starting, 1)
    await watcher.close()
    await put(store, a="2")
    assert watcher.current == {"a": 1}


async def test_a_fault_of_ours_ends_the_watch_and_is_raised(store: FakeStore) -> None:
    def broken(item: KeyValue) -> str:
        raise TypeError("a fault")

    watcher = PrefixWatcher(store, "p/", key_string, broken)
    await watcher.start()
    await put(store, a="1")
    with pytest.raises(TypeError):
        await watcher.wait_failed()
    await watcher.close()


async def test_the_memory_of_faults_is_bounded(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaplan.store.prefix_watcher.MAX_IGNORED", 2)
    watcher = await watch_prefix_with_extraction(store, "p/", key=key_string, value=number)
    await put(store, a="x", b="x", c="x", d="1")
    assert watcher.current == {"d": 1}
    assert len(watcher._ignored) == 2
    await watcher.close()


async def test_one_that_has_ended_its_callbacks_hears_no_more(store: FakeStore) -> None:
    watcher = await watch_prefix_with_extraction(store, "p/", key=key_string, value=number)
    heard: list[str] = []
    watcher.on_change(lambda: heard.append("first"))
    stop = watcher.on_change(lambda: heard.append("second"))
    await put(store, a="1")
    stop()
    stop()
    await put(store, a="2")
    assert heard == ["first", "second", "first"]
    await watcher.close()


async def test_a_start_that_is_cancelled_leaves_no_watch(store: FakeStore) -> None:
    store.go_away()
    watcher = PrefixWatcher(store, "p/", key_string, value_string)
    others = asyncio.all_tasks()
    starting = asyncio.create_task(watcher.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == others
