"""A planner's connector and the client that carries its decisions out, over every key-value store."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.store_keys import DesiredCounts, fleet_key, planner_prefix
from dynaplan.planner.model import Decision
from dynaplan.planner.virtual.connector import VirtualConnector
from dynaplan.runtime import VirtualConnectorClient
from tests.contract.runtimes import runtime_of
from tests.fakes.polling import eventually
from tests.fakes.registrations import FakeRegistrations

FLEET = FleetCounts(WorkerCounts(ready=1, gpus=2.0), WorkerCounts(ready=2, starting=1, startup_s=40.0), 8)


def client_of(store: Any) -> VirtualConnectorClient:
    return VirtualConnectorClient(runtime_of(store))


def connector_of(store: Any) -> VirtualConnector:
    return VirtualConnector(store, "ns", FakeRegistrations())


def decision(prefill: int, decode: int, current: PoolSizes) -> Decision:
    return Decision(current, PoolSizes(prefill, decode), ())


async def write(store: Any, **numbers: int) -> None:
    for name, number in numbers.items():
        await store.put(planner_prefix("ns") + name, str(number))


async def test_a_decision_is_waited_for_carried_out_and_acknowledged(store):
    client, connector = client_of(store), connector_of(store)
    assert await client.get() == DesiredCounts()
    waiting = asyncio.ensure_future(client.wait())
    number = await connector.apply(decision(1, 3, PoolSizes(0, 0)))
    async with asyncio.timeout(5):
        await waiting
    asked = await client.get()
    assert (asked.num_prefill_workers, asked.num_decode_workers, asked.decision_id) == (1, 3, number)
    assert (await connector.desired()).is_pending
    await client.complete(asked)
    assert not (await connector.desired()).is_pending


async def test_waiting_ends_at_once_while_a_decision_is_not_acknowledged(store):
    await write(store, num_decode_workers=2, decision_id=4, scaled_decision_id=3)
    client = client_of(store)
    async with asyncio.timeout(5):
        await client.wait()
    assert (await client.get()).is_pending


async def test_waiting_goes_on_after_the_acknowledgement_until_the_next_decision(store):
    client = client_of(store)
    await write(store, num_decode_workers=2, decision_id=4)
    await client.complete(await client.get())
    waiting = asyncio.ensure_future(client.wait())
    await asyncio.wait({waiting}, timeout=0.2)
    assert not waiting.done()
    await write(store, num_decode_workers=3, decision_id=5)
    async with asyncio.timeout(5):
        await waiting


async def test_an_old_decision_acknowledges_no_newer_one(store):
    client = client_of(store)
    await write(store, num_decode_workers=2, decision_id=4)
    old = await client.get()
    await write(store, num_decode_workers=3, decision_id=5)
    await client.complete(old)
    assert (await client.get()).scaled_decision_id == 4
    await client.complete(await client.get())
    await client.complete(old)
    assert (await client.get()).scaled_decision_id == 5


async def test_decisions_of_a_planner_that_began_again_below_the_acknowledgement_are_seen(store):
    """Dynamo 1.6.1's coordinator begins at 0 when it is restarted; its own client loses these decisions."""
    client = client_of(store)
    await write(store, num_decode_workers=2, decision_id=7)
    await client.complete(await client.get())
    await write(store, num_decode_workers=4, decision_id=0)
    async with asyncio.timeout(5):
        await client.wait()
    await client.complete(await client.get())
    assert (await client.get()).scaled_decision_id == 0


async def test_an_acknowledgement_that_was_seen_stays_when_its_key_goes_with_the_client(store):
    """The key of Dynamo's client is under its lease: it goes when the client ends."""
    connector = connector_of(store)
    await write(store, num_decode_workers=2, decision_id=4, scaled_decision_id=4)
    assert not (await connector.desired()).is_pending
    await store.delete(planner_prefix("ns") + "scaled_decision_id")
    assert not (await connector.desired()).is_pending
    assert await connector.apply(decision(0, 3, PoolSizes(0, 2))) == 5
    assert (await connector.desired()).is_pending


async def test_a_decision_without_a_number_cannot_be_acknowledged(store):
    with pytest.raises(ValueError, match="decision_id is not set"):
        await client_of(store).complete(DesiredCounts())


async def test_the_published_fleet_is_what_the_planner_sees_until_the_client_is_closed(store):
    client = client_of(store)
    await client.publish_fleet(FLEET)
    assert await connector_of(store).fleet() == FLEET
    await client.close()

    async def is_gone() -> bool:
        return await store.get(fleet_key("ns")) is None

    await eventually(is_gone)
