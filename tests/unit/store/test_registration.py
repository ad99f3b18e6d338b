from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dynaplan.config.settings.servers import LEASE_TTL_S
from dynaplan.graph.lifecycle import Role
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.registration import Registration
from dynaplan.util.errors import PermanentError
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


def instances(lease: int) -> list[Instance]:
    return [
        Instance("ns", "VllmWorker", name, lease, "http://127.0.0.1:1") for name in ("generate", "status")
    ]


@pytest.fixture
async def registration(store: FakeStore, clock: Any) -> AsyncIterator[Registration]:
    discovery = Discovery(store, "ns")
    await discovery.start()
    made = Registration(store, clock, discovery, instances, role=Role.DECODE)
    yield made
    store.is_available, store.is_frozen = True, False
    await made.deregister()
    await discovery.close()


def registered(store: FakeStore) -> set[int]:
    return {item.lease for item in store.items.values()}


async def within(seconds: float, check: Callable[[], bool]) -> None:
    """Virtual time costs nothing: look every 10 ms of it."""
    for _ in range(int(seconds / 0.01)):
        if check():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {seconds} s")


async def test_all_keys_of_the_process_live_under_one_lease(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    assert sorted(store.items) == [
        "/services/ns/VllmWorker/generate/3e9",
        "/services/ns/VllmWorker/status/3e9",
        "v1/instances/ns/VllmWorker/generate/3e9",
        "v1/instances/ns/VllmWorker/status/3e9",
        "v1/instances/ns/backend/generate/3e9",
        "v1/instances/ns/backend/status/3e9",
    ]
    assert registered(store) == {registration.instance_id}


async def test_the_lease_is_kept_alive_at_half_of_what_remains(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    await asyncio.sleep(61)
    assert store.keep_alives == 12
    assert registered(store) == {1001}


async def test_a_revoked_lease_is_noticed_at_once(registration: Registration, store: FakeStore) -> None:
    await registration.start()
    await asyncio.sleep(25)
    await store.revoke(registration.instance_id)
    await asyncio.wait_for(registration.revoked.wait(), 0.05)
    assert store.items == {}


async def test_a_revocation_during_a_short_outage_still_drains(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    await asyncio.sleep(1)
    lease = registration.instance_id
    store.go_away()
    await asyncio.sleep(1)
    store.come_back()
    await store.revoke(lease)
    assert await asyncio.wait_for(registration.revoked.wait(), 1)


async def test_a_lease_that_lapsed_while_this_process_stood_still_is_replaced(
    registration: Registration, store: FakeStore, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registration.start()

    async def stand_still(lease: int) -> float:
        monkeypatch.undo()
        await asyncio.sleep(LEASE_TTL_S + 5)
        return await store.keep_alive(lease)

    monkeypatch.setattr(store, "keep_alive", stand_still)
    monkeypatch.setattr("dynaplan.store.registration.STORE_CALL_TIMEOUT_S", 3600)
    await within(40, lambda: registered(store) == {1002})
    assert not registration.revoked.is_set()
    assert registration.instance_id == 1002


async def test_an_outage_longer_than_the_ttl_in_which_the_lease_lapsed_means_a_new_lease(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    store.go_away()
    await asyncio.sleep(40)
    store._end_lease(registration.instance_id)
    store.come_back()
    await within(5, lambda: registered(store) == {1002})
    assert not registration.revoked.is_set()


async def test_an_outage_that_the_lease_survived_changes_nothing(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    store.go_away()
    await asyncio.sleep(40)
    store.come_back()
    await asyncio.sleep(60)
    assert registered(store) == {1001}
    assert not registration.revoked.is_set()


async def test_a_store_that_does_not_answer_at_all_is_asked_again(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    store.is_frozen = True
    await asyncio.sleep(8)
    store.is_frozen = False
    await asyncio.sleep(30)
    assert len(registered(store)) == 1
    assert not registration.revoked.is_set()


async def test_a_store_that_came_back_empty_is_registered_in_again_and_drains_nobody(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    await asyncio.sleep(1)
    store.go_away()
    await asyncio.sleep(1)
    store.come_back_empty()
    await within(1, lambda: registered(store) == {1002})
    assert len(store.items) == 6
    assert not registration.revoked.is_set()


async def test_a_deleted_key_is_put_again_under_the_same_lease(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    await asyncio.sleep(5)
    key = next(key for key in store.items if key.startswith("/services/"))
    await store.delete(key)
    await within(0.1, lambda: key in store.items)
    assert registered(store) == {1001}
    assert not registration.revoked.is_set()


async def test_a_revocation_drains_even_after_somebody_deleted_everything(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    store._identity += 1  # what identifies the store was deleted as well
    for key in list(store.items):
        await store.delete(key)
    await within(0.1, lambda: len(store.items) == 6)
    await store.revoke(registration.instance_id)
    assert await asyncio.wait_for(registration.revoked.wait(), 0.1)


async def test_registering_waits_for_a_store_that_is_away(
    registration: Registration, store: FakeStore
) -> None:
    store.go_away()
    starting = asyncio.create_task(registration.start())
    await asyncio.sleep(120)
    assert not starting.done()
    assert registration.instance_id == 0
    store.come_back()
    await asyncio.wait_for(starting, 3)
    assert registered(store) == {registration.instance_id}


async def test_withdrawing_revokes_the_lease_and_is_not_taken_for_a_revocation_by_somebody(
    registration: Registration, store: FakeStore
) -> None:
    await registration.start()
    await registration.deregister()
    await asyncio.sleep(30)
    assert store.items == {}
    assert not registration.revoked.is_set()


async def test_withdrawing_is_bounded_while_the_store_is_away(
    registration: Registration, store: FakeStore, clock: Any
) -> None:
    await registration.start()
    store.is_frozen = True
    begun_s = clock.now_s()
    await registration.deregister(timeout_s=2.0)
    assert clock.now_s() - begun_s <= 2.1


async def test_withdrawing_does_not_raise_what_the_store_refuses(
    registration: Registration, store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await registration.start()

    async def refuse(lease: int) -> None:
        raise PermanentError("you may not")

    monkeypatch.setattr(store, "revoke", refuse)
    await registration.deregister()
    monkeypatch.undo()
    await asyncio.sleep(LEASE_TTL_S + 1)
    assert store.items == {}
