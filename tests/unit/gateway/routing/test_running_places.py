"""A router keeps a planner's limit of running requests, and loses nobody over it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.gateway.routing.worker_router import Booking, WorkerRouter
from dynaplan.gateway.timing import AVOID_WORKER_S
from tests.unit.gateway.routing.test_worker_router import Instances, call, router

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

PLAIN = FrontendSettings()
CALL = call("hello")
DEADLINE_S = 60.0
PATIENT = RunningLimit(2, wait_s=5.0, ends_per_s=1.0)


def limited(
    limit: RunningLimit = PATIENT, *ids: int, instances: Instances | None = None, **more: Any
) -> WorkerRouter:
    made = router(instances or Instances(*(ids or (1,))), PLAIN, **more)
    made.places.follow(limit.to_text())
    return made


async def book(routed: WorkerRouter, number: int = 1) -> list[Booking]:
    return [await routed.book(CALL, DEADLINE_S) for _ in range(number)]


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def test_one_more_than_the_limit_waits_until_one_has_ended() -> None:
    routed = limited()
    first, _ = await book(routed, 2)
    third = asyncio.create_task(routed.book(CALL, DEADLINE_S))
    await asyncio.sleep(1.0)
    assert not third.done()
    assert len(routed.places.waiting) == 1
    first.close()
    await third
    assert now_s() == pytest.approx(1.0)
    assert routed.in_flight_at(1) == 2


async def test_those_that_wait_have_their_places_in_the_order_of_arrival() -> None:
    routed, order = limited(), []

    async def come(name: int) -> None:
        await routed.book(CALL, DEADLINE_S)
        order.append(name)

    running = await book(routed, 2)
    waiting = [asyncio.create_task(come(name)) for name in range(3)]
    await asyncio.sleep(0.1)
    for booking in running:
        booking.close()
    await asyncio.sleep(0.1)
    assert order == [0, 1]
    assert routed.in_flight_at(1) == 2
    for task in waiting:
        task.cancel()


async def test_after_the_time_that_the_ttft_leaves_a_request_goes_to_a_full_worker() -> None:
    routed = limited()
    await book(routed, 3)
    assert now_s() == pytest.approx(PATIENT.wait_s)
    assert routed.in_flight_at(1) == 3


async def test_where_waiting_is_in_vain_the_limit_yields_at_once() -> None:
    routed = limited(RunningLimit(2, wait_s=5.0, ends_per_s=0.1))
    await book(routed, 20)
    assert now_s() == 0.0


async def test_a_worker_below_the_limit_is_chosen_whoever_s_turn_it_is() -> None:
    routed = limited(PATIENT, 1, 2)
    bookings = await book(routed, 4)
    bookings[0].close()
    bookings[2].close()  # both of worker 1
    again = await book(routed, 2)
    assert [each.instance.instance_id for each in again] == [1, 1]


async def test_a_client_that_leaves_gives_its_place_to_the_next() -> None:
    routed = limited()
    first, _ = await book(routed, 2)
    third, fourth = (asyncio.create_task(routed.book(CALL, DEADLINE_S)) for _ in range(2))
    await asyncio.sleep(0.1)
    first.close()
    third.cancel()
    await fourth
    assert now_s() == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["", "nonsense", '{"most": 0, "wait_s": 1, "ends_per_s": 1}'])
async def test_without_a_limit_all_that_wait_go_on(text: str) -> None:
    routed = limited()
    await book(routed, 2)
    third = asyncio.create_task(routed.book(CALL, DEADLINE_S))
    await asyncio.sleep(0.1)
    routed.places.follow(text)
    await third
    await book(routed, 3)
    assert now_s() == pytest.approx(0.1)


async def test_the_end_of_a_request_from_before_the_limit_lets_one_go_on() -> None:
    routed = router(Instances(1), PLAIN)
    first, _ = await book(routed, 2)
    routed.places.follow(PATIENT.to_text())
    third = asyncio.create_task(routed.book(CALL, DEADLINE_S))
    await asyncio.sleep(0.1)
    first.close()
    await third
    assert now_s() == pytest.approx(0.1)


async def test_who_is_held_back_checks_every_second_and_goes_on_at_the_deadline() -> None:
    routed = limited(RunningLimit(2, wait_s=30.0, ends_per_s=1.0))
    await book(routed, 2)
    checks = []

    async def check() -> None:
        checks.append(round(now_s()))

    await routed.book(CALL, 3.5, check)
    assert now_s() == pytest.approx(3.5)
    assert checks[:3] == [1, 2, 3]


async def test_a_check_that_fails_ends_the_wait() -> None:
    routed = limited()
    await book(routed, 2)

    async def check() -> None:
        raise TimeoutError("not loaded in time")

    with pytest.raises(TimeoutError):
        await routed.book(CALL, DEADLINE_S, check)
    assert not routed.places.waiting


async def test_a_worker_that_is_avoided_no_longer_takes_one_that_is_held_back() -> None:
    instances = Instances(1, 2)
    routed = limited(RunningLimit(1, wait_s=30.0, ends_per_s=1.0), instances=instances)
    routed.avoid(instances.now[1])
    await book(routed, 2)
    assert now_s() == pytest.approx(AVOID_WORKER_S, abs=0.01)
    assert [routed.in_flight_at(each) for each in (1, 2)] == [1, 1]


@pytest.mark.parametrize(("most", "part"), [(7, 1), (8, 2), (1, 1)])
async def test_a_frontend_s_part_is_rounded_down_and_never_nothing(most: int, part: int) -> None:
    routed = limited(RunningLimit(most, wait_s=5.0, ends_per_s=2.0), frontends=4)
    assert routed.places.limit
    assert routed.places.limit.most == part


async def test_each_frontend_keeps_its_part_of_the_limit() -> None:
    routed = limited(RunningLimit(4, wait_s=5.0, ends_per_s=2.0), frontends=2)
    assert routed.places.limit == RunningLimit(2, wait_s=5.0, ends_per_s=1.0)
    await book(routed, 3)
    assert now_s() == pytest.approx(5.0)


async def test_a_model_s_queue_does_not_pass_those_that_wait() -> None:
    routed = limited()
    await book(routed, 2)
    assert routed.book_at_once() is None
