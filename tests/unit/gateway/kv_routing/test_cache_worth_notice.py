"""A frontend tells what the workers' caches have served, under its own lease."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.fleet.store_keys import CACHE_WORTH, worth_in
from dynaplan.gateway.kv_routing.cache_worth_notice import CacheWorthNotice
from dynaplan.store.memory import MemoryStore
from tests.fakes.clock import ManualClock


class Here:
    """A frontend's notice over a store in memory."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.runtime = SimpleNamespace(
            namespace="ns", instance_id=0, store=self.store, clock=self.clock, worker_name="ns_Frontend"
        )
        self.notice = CacheWorthNotice(cast(Any, self.runtime))

    async def register(self) -> None:
        self.runtime.instance_id = await self.store.grant(10)

    async def told(self) -> dict[int, int]:
        return worth_in(item.value for item in await self.store.list(CACHE_WORTH.prefix("ns")))


@pytest.fixture
async def here() -> Here:
    here = Here()
    await here.register()
    return here


async def test_what_caches_served_is_told_and_goes_with_the_frontends_lease(here: Here) -> None:
    here.notice.served(7, 1600)
    here.notice.served(8, 0)
    await here.notice.tell()
    assert await here.told() == {7: 1600}
    await here.store.revoke(here.runtime.instance_id)
    assert await here.told() == {}
    await here.register()
    await here.notice.tell()
    assert await here.told() == {7: 1600}


async def test_nothing_is_written_that_is_there_already_nor_before_anything_was_served(here: Here) -> None:
    await here.notice.tell()
    here.notice.served(0, 100)  # of an instance that is not known any more
    await here.notice.tell()
    assert await here.store.list(CACHE_WORTH.prefix("ns")) == ()
    here.notice.served(7, 1600)
    await here.notice.tell()
    (before,) = await here.store.list(CACHE_WORTH.prefix("ns"))
    await here.notice.tell()
    (after,) = await here.store.list(CACHE_WORTH.prefix("ns"))
    assert after.revision == before.revision


async def test_a_frontend_that_is_not_registered_tells_nothing() -> None:
    here = Here()
    here.notice.served(7, 1600)
    await here.notice.tell()
    assert await here.store.list(CACHE_WORTH.prefix("ns")) == ()
