"""The choices of an endpoint's client, and the errors that say whose fault it is. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import DeadlineExceeded, PermanentError, TemporaryError, UserError
from dynaplan.worker import endpoint_client
from dynaplan.worker.endpoint_client import EndpointClient, NotAccepted, rotate
from tests.fakes.store import FakeStore

pytestmark = pytest.mark.looptime

DRAINING, BREAKS_OFF = 3, 4


class Plant:
    """Instances in a fake store, and a client of them.

    ``post_request`` is replaced by what an instance does: it yields its id and the request, or, as one that
    drains or is lost, raises NotAccepted.
    """

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.asked: list[int] = []
        self.discovery = Discovery(store, "ns")
        session: Any = None
        self.client = EndpointClient("backend", "generate", self.discovery, session, find_instance_s=5)

    async def add(self, number: int) -> Instance:
        instance = Instance("ns", "backend", "generate", number, f"http://{number}")
        await self.store.put(instance.key, instance.to_json())
        await asyncio.sleep(0.01)
        return instance

    async def post_request(
        self, _: Any, instance: Instance, body: bytes, deadline_s: float
    ) -> AsyncGenerator[Any, None]:
        self.asked.append(instance.instance_id)
        if instance.instance_id == DRAINING:
            raise NotAccepted("this worker is draining")
        yield instance.instance_id
        if instance.instance_id == BREAKS_OFF:
            raise NotAccepted("the connection was lost")
        await asyncio.sleep(10 if body == b'"slow"' else 0)
        yield body.decode()


@pytest.fixture
async def plant(store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Plant]:
    made = Plant(store)
    monkeypatch.setattr(endpoint_client, "post_request", made.post_request)
    await made.discovery.start()
    yield made
    await made.discovery.close()


async def collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_it_asks_the_instances_in_turn_at_random_or_the_one_that_is_named(plant: Plant) -> None:
    for number in (1, 2, 5):
        await plant.add(number)
    assert plant.client.instance_ids() == (1, 2, 5)
    assert [(await collected(plant.client.round_robin({})))[0] for _ in range(4)] == [1, 2, 5, 1]
    assert {(await collected(plant.client.random({})))[0] for _ in range(60)} == {1, 2, 5}
    assert await collected(plant.client.direct({"a": 1}, 5)) == [5, '{"a": 1}']


async def test_one_that_drains_leaves_the_call_to_the_next(plant: Plant) -> None:
    await plant.add(DRAINING)
    await plant.add(7)
    assert await collected(plant.client.round_robin()) == [7, "null"]
    assert plant.asked == [DRAINING, 7]


async def test_the_named_one_is_not_replaced_and_not_asked_twice(plant: Plant) -> None:
    await plant.add(DRAINING)
    await plant.add(7)
    with pytest.raises(TemporaryError, match="Take another instance"):
        await collected(plant.client.direct({}, DRAINING))
    assert plant.asked == [DRAINING]


async def test_an_id_that_nobody_has_is_answered_with_those_that_there_are(plant: Plant) -> None:
    with pytest.raises(PermanentError, match="Registered: none"):
        await collected(plant.client.direct({}, 9))
    await plant.add(7)
    with pytest.raises(PermanentError, match=r"backend.generate has no instance 9\n  Registered: 7"):
        await collected(plant.client.direct({}, 9))


async def test_one_that_is_lost_in_the_middle_of_its_answer_is_worth_a_retry_by_the_caller(
    plant: Plant,
) -> None:
    await plant.add(BREAKS_OFF)
    answer = plant.client.round_robin()
    assert await anext(answer) == BREAKS_OFF
    with pytest.raises(TemporaryError, match=r"backend.generate broke off"):
        await anext(answer)


async def test_without_an_instance_it_looks_for_a_while(plant: Plant) -> None:
    begun_s = asyncio.get_running_loop().time()
    with pytest.raises(TemporaryError, match="no instance of backend answers generate"):
        await collected(plant.client.round_robin())
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(5, abs=0.6)


async def test_the_calls_own_time_bounds_the_looking_too(plant: Plant) -> None:
    begun_s = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await collected(plant.client.random(timeout_s=2))
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(2, abs=0.1)


async def test_an_answer_that_stands_still_ends_at_the_deadline(plant: Plant) -> None:
    await plant.add(7)
    answer = plant.client.round_robin("slow", timeout_s=3)
    assert await anext(answer) == 7
    with pytest.raises(DeadlineExceeded, match=r"backend.generate has not answered in time"):
        await anext(answer)


async def test_a_request_that_json_cannot_carry_is_the_callers_fault(plant: Plant) -> None:
    with pytest.raises(UserError, match="cannot be sent as JSON"):
        await collected(plant.client.round_robin({"text": object()}))


async def test_waiting_ends_when_enough_instances_are_there(plant: Plant) -> None:
    waiting = asyncio.create_task(plant.client.wait_for_instances(2))
    await plant.add(1)
    assert not waiting.done()
    await plant.add(2)
    assert await waiting == (1, 2)
    assert await plant.client.wait_for_instances() == (1, 2)


async def test_waiting_in_vain_says_how_many_there_are(plant: Plant) -> None:
    await plant.add(1)
    with pytest.raises(TemporaryError, match=r"1 of 2 instances of backend.generate are there after 3 s"):
        await plant.client.wait_for_instances(2, timeout_s=3)


def test_a_round_begins_above_the_last_one_and_goes_on_from_the_lowest() -> None:
    assert rotate((5, 1, 9), -1) == (1, 5, 9)
    assert rotate((5, 1, 9), 1) == (5, 9, 1)
    assert rotate((5, 1, 9), 9) == (1, 5, 9)


def test_an_instance_that_has_gone_leaves_its_turn_to_the_next() -> None:
    assert rotate((1, 9), 5) == (9, 1)
    assert rotate((), 5) == ()
