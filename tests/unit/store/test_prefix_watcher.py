from __future__ import annotations

import asyncio

import pytest

from dynaplan.store.model import KeyValue
from dynaplan.store.prefix_watcher import (
    PrefixWatcher,
    value_string,
)
from dynaplan.util.documents import whole_number
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def number(item: KeyValue) -> int:
    found = whole_number(item.value)
    if found is None:
        raise ValueError(f"{item.value!r} is no number")
    return found


async def started(store: FakeStore) -> PrefixWatcher[int]:
    watcher = PrefixWatcher(store, "p/", number)
    await watcher.start()
    return watcher


async def put(store: FakeStore, lease: int = 0, **values: str) -> None:
    for name, value in values.items():
        await store.put(f"p/{name}", value, lease)
    await asyncio.sleep(0.01)


async def test_the_mapping_follows_writes_and_deletions_in_key_order(store: FakeStore) -> None:
    await put(store, b="1")
    watcher = await started(store)
    before = watcher.current
    await put(store, a="2", b="3")
    assert list(watcher.current.items()) == [("p/a", 2), ("p/b", 3)]
    assert before == {"p/b": 1}, "an earlier mapping stays as it was"
    await store.delete("p/b")
    await store.delete("p/b")
    await asyncio.sleep(0.01)
    assert watcher.current == {"p/a": 2}
    await watcher.close()


async def test_a_value_that_cannot_be_read_is_logged_once_and_skipped(
    store: FakeStore, caplog: pytest.LogCaptureFixture
) -> None:
    watcher = await started(store)
    for _ in range(3):
        await put(store, a="x")
    await put(store, b="1")
    assert watcher.current == {"p/b": 1}
    await put(store, b="x")
    assert watcher.current == {"p/b": 1}, "what it held before stays"
    await put(store, a="y", b="2")
    assert watcher.current == {"p/b": 2}
    assert caplog.messages == [
        "ignoring p/a: 'x' is no number",
        "ignoring p/b: 'x' is no number",
        "ignoring p/a: 'y' is no number",
    ]
    await watcher.close()


async def test_the_first_snapshot_and_every_change_are_told_and_a_repetition_is_not(store: FakeStore) -> None:
    seen: list[dict[str, int]] = []
    snapshots: list[int] = []
    watcher = PrefixWatcher(store, "p/", number)
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
    assert seen == [{}, {"p/a": 1}, {}]
    assert snapshots == [0, 2, 3], "a snapshot is told before the change that it brings"
    await watcher.close()


async def test_starting_waits_for_a_store_and_closing_leaves_the_mapping(
    store: FakeStore,
) -> None:
    await put(store, a="1")
    store.go_away()
    watcher = PrefixWatcher(store, "p/", number)
    starting = asyncio.create_task(watcher.start())
    await asyncio.sleep(60)
    assert not starting.done()
    store.come_back()
    await asyncio.wait_for(starting, 1)
    await watcher.close()
    await put(store, a="2")
    assert watcher.current == {"p/a": 1}


async def test_a_fault_of_ours_ends_the_watch_and_is_raised(store: FakeStore) -> None:
    def broken(item: KeyValue) -> str:
        raise TypeError("a fault")

    watcher = PrefixWatcher(store, "p/", broken)
    await watcher.start()
    await put(store, a="1")
    with pytest.raises(TypeError):
        await watcher.wait_failed()
    await watcher.close()


async def test_the_memory_of_faults_is_bounded(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaplan.store.prefix_watcher.MAX_IGNORED", 2)
    watcher = await started(store)
    await put(store, a="x", b="x", c="x", d="1")
    assert watcher.current == {"p/d": 1}
    assert len(watcher._ignored) == 2
    await watcher.close()


async def test_one_that_has_ended_its_callbacks_hears_no_more(store: FakeStore) -> None:
    watcher = await started(store)
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
    watcher = PrefixWatcher(store, "p/", value_string)
    others = asyncio.all_tasks()
    starting = asyncio.create_task(watcher.start())
    await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == others
