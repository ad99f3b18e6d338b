"""The Frontend before engines that fall asleep: what waits for an answer there is not forgotten."""

from __future__ import annotations

import asyncio

import pytest

from dynaplan.store.instances import ASLEEP, WAKE
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.polling import eventually

CHAT = "/v1/chat/completions"


async def falls_asleep(here: Stage, number: int, reason: str = "") -> None:
    """The worker of that instance id says that its engine sleeps."""
    await here.store.put(ASLEEP.key("ns", number), reason)


async def is_awake(here: Stage, number: int) -> None:
    await here.store.delete(ASLEEP.key("ns", number))


@pytest.mark.parametrize(
    ("act", "is_stream"), [("hold_before", False), ("hold_before", True), ("hold_at_role", True)]
)
async def test_what_waits_at_an_engine_that_falls_asleep_goes_to_another(act: str, is_stream: bool) -> None:
    async with stage() as here:
        sleeper, other = await here.worker(act), await here.worker()
        answering = asyncio.create_task(here.post(stream=is_stream))
        await eventually(lambda: sleeper.in_flight == 1)
        await falls_asleep(here, 1)
        status, text = await answering
        await eventually(lambda: sleeper.in_flight == 0)
    assert (status, "t4 " in text) == (200, True)
    assert (len(sleeper.bodies), len(other.bodies)) == (1, 1)


async def test_no_number_of_sleeping_engines_is_taken_for_a_request_that_kills() -> None:
    async with stage() as here:
        workers = [await here.worker("hold_before") for _ in range(4)]
        answering = asyncio.create_task(here.post())
        for _ in workers[:3]:
            await eventually(lambda: any(each.in_flight for each in workers))
            (number,) = (index for index, each in enumerate(workers, 1) if each.in_flight)
            await falls_asleep(here, number)
            await eventually(lambda number=number: workers[number - 1].in_flight == 0)  # type: ignore[misc]
        for each in workers:
            each.go_on.set()
        assert (await answering)[0] == 200
    assert [len(each.bodies) for each in workers] == [1, 1, 1, 1]


async def test_the_only_engine_that_falls_asleep_over_a_request_is_woken_for_it() -> None:
    async with stage() as here:
        worker = await here.worker("hold_before")
        answering = asyncio.create_task(here.post())
        await eventually(lambda: worker.in_flight == 1)
        await falls_asleep(here, 1)
        await eventually(lambda: here.store.get(WAKE.key("ns", 1)))
        worker.go_on.set()
        await is_awake(here, 1)
        assert (await answering)[0] == 200
    assert len(worker.bodies) == 2


async def test_one_that_cannot_be_woken_is_answered_with_the_reason() -> None:
    async with stage() as here:
        worker = await here.worker("hold_before")
        answering = asyncio.create_task(here.post())
        await eventually(lambda: worker.in_flight == 1)
        await falls_asleep(here, 1, "It sleeps without its weights.")
        status, text = await answering
    assert status == 503
    assert "asleep, and cannot be woken. It sleeps without its weights." in text


async def test_a_stream_that_has_begun_stays_where_it_is() -> None:
    async with stage() as here:
        sleeper, other = await here.worker("hold_within"), await here.worker()
        async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
            begun = await response.content.readany()
            await falls_asleep(here, 1)
            assert (await here.post())[0] == 200
            sleeper.go_on.set()
            whole = begun + await response.content.read()
    assert b"[DONE]" in whole
    assert (len(sleeper.bodies), len(other.bodies)) == (1, 1)


async def test_a_client_that_leaves_beside_a_sleeping_engine_ends_its_request() -> None:
    async with stage() as here:
        worker = await here.worker("hold_before")
        answering = asyncio.create_task(here.post())
        await eventually(lambda: worker.in_flight == 1)
        await falls_asleep(here, 1)
        await eventually(lambda: worker.in_flight == 0)
        answering.cancel()
        await eventually(lambda: here.frontend.in_flight == 0)
