from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from dynaplan.store.hub import WatchHub, ensure_identity
from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, WatchEvent


def item(key: str, value: str = "v", revision: int = 1) -> KeyValue:
    return KeyValue(key, value, revision)


async def begin(events: AsyncGenerator[WatchEvent]) -> asyncio.Task[WatchEvent]:
    """Ask a watch for its first event, so that it is there."""
    first = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    return first


async def test_a_watch_waits_until_the_keys_are_known() -> None:
    hub = WatchHub()
    first = await begin(hub.watch("a/"))
    assert not first.done()
    hub.replace([item("b/1"), item("a/2"), item("a/1")])
    assert await first == Snapshot((item("a/1"), item("a/2")))


async def test_a_watch_gets_the_changes_under_its_prefix_in_order() -> None:
    hub = WatchHub(has_synced=True)
    events = hub.watch("a/")
    assert await anext(events) == Snapshot(())
    changes: list[Put | Deleted] = [Put(item("a/1")), Put(item("b/1")), Deleted("a/1"), Put(item("a/1", "w"))]
    hub.apply(changes)
    assert [await anext(events) for _ in range(3)] == [changes[0], *changes[2:]]
    assert [each.key for each in hub.list("")] == ["a/1", "b/1"]


async def test_a_watch_waits_for_the_version_that_it_asks_for() -> None:
    hub = WatchHub(has_synced=True)
    first = await begin(hub.watch("", since=2))
    hub.apply([Put(item("a"))], 1)
    assert not first.done()
    hub.apply([], 2)
    assert await first == Snapshot((item("a"),))


async def test_a_new_beginning_is_a_new_snapshot_and_needs_no_older_version() -> None:
    hub = WatchHub(has_synced=True)
    hub.apply([Put(item("a"))], 7)
    events = hub.watch("")
    await anext(events)
    waiting = await begin(hub.watch("", since=9))
    hub.invalidate()
    hub.replace([item("b")], 1)
    assert await anext(events) == Snapshot((item("b"),))
    assert await waiting == Snapshot((item("b"),))


async def test_an_update_tells_the_differences_alone() -> None:
    hub = WatchHub()
    hub.update({"a": item("a"), "b": item("b")})
    events = hub.watch("")
    await anext(events)
    hub.update({"b": item("b"), "c": item("c")})
    assert [await anext(events) for _ in range(2)] == [Deleted("a"), Put(item("c"))]
    hub.update({"b": item("b", revision=2)})
    assert [await anext(events) for _ in range(2)] == [Deleted("c"), Put(item("b", revision=2))]


async def test_a_watch_that_is_left_is_forgotten() -> None:
    hub = WatchHub(has_synced=True)
    events = hub.watch("")
    await anext(events)
    assert len(hub._watches) == 1
    await events.aclose()
    assert hub._watches == []


async def test_an_error_ends_the_watches_there_are_and_later_ones_begin() -> None:
    hub = WatchHub(has_synced=True)
    events = hub.watch("")
    await anext(events)
    hub.fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await anext(events)
    assert await anext(hub.watch("")) == Snapshot(())


async def test_closing_ends_watches_after_what_they_have_got() -> None:
    hub = WatchHub(has_synced=True)
    events = hub.watch("")
    hub.apply([Put(item("a"))])
    await anext(events)
    hub.apply([Put(item("b"))])
    hub.close()
    assert [event async for event in events] == [Put(item("b"))]
    assert [event async for event in hub.watch("")] == []


async def test_of_many_that_write_the_identity_all_have_the_first_ones() -> None:
    marks: list[str] = []

    async def read() -> str | None:
        await asyncio.sleep(0)
        return marks[0] if marks else None

    async def create(mark: str) -> None:
        if not marks:
            marks.append(mark)

    assert set(await asyncio.gather(*(ensure_identity(read, create) for _ in range(5)))) == set(marks)
