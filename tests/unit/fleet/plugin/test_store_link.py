"""The fleet plugin's link to the store: where the keys are, and what it moves when it starts."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest

from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.store.instances import ASLEEP, WAKE
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from tests.fakes.polling import eventually


async def values(store: MemoryStore) -> dict[str, str]:
    return {item.key: item.value for item in await store.list("v1/ns/planner")}


async def test_extensions_of_the_version_before_are_moved_and_later_ones_win() -> None:
    store = MemoryStore(SystemClock())
    for name, value in {"holds": "{}", "store_id": "s", "decision_id": "3"}.items():
        await store.put(f"v1/ns/planner/{name}", value)
    await store.put("v1/ns/planner_extensions/holds", '{"decode": {"at_least": 1}}')
    link = StoreLink(store, "ns", asyncio.Event())
    link.start()
    try:

        async def is_moved() -> bool:
            return await values(store) == {
                "v1/ns/planner/decision_id": "3",
                "v1/ns/planner_extensions/holds": '{"decode": {"at_least": 1}}',
                "v1/ns/planner_extensions/store_id": "s",
            }

        await eventually(is_moved)
        found = await link.read_persisted()
        assert found
        assert set(found.planner) == {"decision_id", "holds", "store_id"}
    finally:
        await link.close()
        await store.close()


@pytest.mark.parametrize("steps", range(12))
async def test_a_link_that_is_closed_at_any_moment_leaves_no_call_that_nobody_awaits(steps: int) -> None:
    """A task that is cancelled before its first step drops its arguments: none may be a coroutine."""
    store = MemoryStore(SystemClock())
    await store.put("v1/ns/planner/holds", "{}")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        link = StoreLink(store, "ns", asyncio.Event())
        link.start()
        for _ in range(steps):
            await asyncio.sleep(0)
        await link.close()
        gc.collect()
    await store.close()
    assert [str(each.message) for each in told] == []


async def test_orders_to_sleep_and_wake_go_with_their_instance() -> None:
    store = MemoryStore(SystemClock())
    link = StoreLink(store, "ns", asyncio.Event())
    link.start()
    link.follow_demand()
    lease = await store.grant(60)
    try:
        link.put_to_sleep(lease, "1")
        await eventually(lambda: link.sleep_orders == {lease: "1"})
        await store.put(ASLEEP.key("ns", lease), "no way", lease)
        await eventually(lambda: link.sleep_reasons == {lease: "no way"})
        link.wake_up(lease)
        await eventually(lambda: link.sleep_orders == {})
        assert await store.get(WAKE.key("ns", lease))
        await store.revoke(lease)
        await eventually(lambda: link.sleep_reasons == {})
        assert await store.get(WAKE.key("ns", lease)) is None
    finally:
        await link.close()
        await store.close()
