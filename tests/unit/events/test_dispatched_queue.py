"""One worker takes from the shared queue by deadline. MemoryMessenger is a twin of NATS (tests/contract)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynaplan.events.dispatched_queue import LATE_LANE, LATE_LANE_POLL_S, DispatchedQueue
from dynaplan.events.port import WorkQueue
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import QueueUnavailable
from tests.fakes.clock import LoopClock
from tests.fakes.memory_messenger import MemoryMessenger

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

STREAM = "ns_prefill_queue"


class Setup:
    """A stream in memory, and workers that take from it; the wall clock is the loop's."""

    def __init__(self) -> None:
        self.messenger = MemoryMessenger(LoopClock())
        self.opened = 0
        self.workers: list[DispatchedQueue] = []

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    async def worker(self) -> DispatchedQueue:
        async def open_late() -> WorkQueue:
            self.opened += 1
            return await self.messenger.queue(STREAM, LATE_LANE)

        shared = await self.messenger.queue(STREAM)
        self.workers.append(DispatchedQueue(shared, open_late, LoopClock(), self.now_s))
        return self.workers[-1]

    async def put(
        self, name: str, deadline_s: float | None, *, owed_s: float = 1e9, waits_s: float = 0.0
    ) -> None:
        """Put a prompt whose deadline is in that many seconds; None: it has none."""
        now_s = self.now_s()
        times = {}
        if deadline_s is not None:
            times = {
                "arrived_unix_s": now_s + deadline_s - 10.0,
                "deadline_unix_s": now_s + deadline_s,
                "owed_unix_s": now_s + owed_s,
                "waits_until_unix_s": now_s + waits_s if waits_s else 0.0,
            }
        payload = RemotePrefillRequest(name, **times).to_json()
        await (await self.messenger.queue(STREAM)).put(payload)


@pytest.fixture
async def setup() -> Any:
    made = Setup()
    await asyncio.sleep(1.0)  # the loop's clock is not 0, which means no deadline
    yield made
    for worker in made.workers:
        await worker.close()


async def next_name(worker: DispatchedQueue, timeout_s: float = 1.0) -> str | None:
    """The name of the next prompt that the worker gets, which is done at once."""
    item = await worker.get(timeout_s)
    if item is None:
        return None
    await item.ack()
    return RemotePrefillRequest.from_json(item.payload).request_id


async def all_names(worker: DispatchedQueue) -> list[str]:
    names = []
    for _ in range(40):
        name = await next_name(worker)
        if name:
            names.append(name)
        elif not await worker._shared.depth():
            break
    return names


async def test_without_deadlines_it_is_the_shared_queue_and_no_lane_is_opened(setup: Setup) -> None:
    worker = await setup.worker()
    for name in "abc":
        await setup.put(name, None)
    await worker._shared.put(b"no request at all")

    assert [await next_name(worker) for _ in "abc"] == ["a", "b", "c"]
    item = await worker.get(1.0)
    assert item and item.payload == b"no request at all"
    assert setup.opened == 0


async def test_a_late_prompt_comes_after_those_in_time_and_is_not_lost(setup: Setup) -> None:
    worker = await setup.worker()
    for name, deadline_s in (("late 1", -1.0), ("late 2", -0.5), ("in time", 60.0)):
        await setup.put(name, deadline_s)
    assert await next_name(worker) == "in time"
    await setup.put("in time 2", 60.0)

    assert await all_names(worker) == ["in time 2", "late 1", "late 2"]


async def test_what_usually_takes_longer_than_is_left_is_late(setup: Setup) -> None:
    worker = await setup.worker()
    for _ in range(50):
        worker.computed(2.0)
    await setup.put("late", 1.9)
    await setup.put("in time", 30.0)

    assert await all_names(worker) == ["in time", "late"]


async def test_a_prompt_that_was_owed_for_long_comes_every_second_time(setup: Setup) -> None:
    worker = await setup.worker()
    for name in ("late 1", "late 2"):
        await setup.put(name, -2.0, owed_s=-1.0)
    for number in range(4):
        await setup.put(f"in time {number}", 60.0)
    first = await next_name(worker)
    await asyncio.sleep(0.2)  # the worker comes upon the late ones and takes one in hand

    names = [first]
    for _ in range(5):
        names.append(await next_name(worker))
        await asyncio.sleep(0.2)
    assert names == ["in time 0", "late 1", "in time 1", "late 2", "in time 2", "in time 3"]


async def test_a_prompt_that_nobody_waits_for_any_more_is_dropped(setup: Setup) -> None:
    worker = await setup.worker()
    await setup.put("gone", -2.0, waits_s=-1.0)
    await setup.put("goes", -2.0, waits_s=0.3)
    await setup.put("in time", 60.0)
    assert await next_name(worker) == "in time"
    await worker._shared.put(RemotePrefillRequest("last").to_json())
    lane = await setup.messenger.queue(STREAM, LATE_LANE)
    await lane.put(b"no request at all")

    await asyncio.sleep(0.5)
    names = await all_names(worker)
    assert "gone" not in names
    assert await lane.depth() == 0


async def test_the_prompt_in_hand_is_not_given_to_others_and_goes_back_when_the_worker_ends(
    setup: Setup,
) -> None:
    one, other = await setup.worker(), await setup.worker()
    await setup.put("late", -1.0)
    await setup.put("in time", 60.0)
    assert await next_name(one, 0.1) == "in time"
    await asyncio.sleep(10.0)
    lane = await setup.messenger.queue(STREAM, LATE_LANE)
    assert await lane.get(0.0) is None
    assert await lane.depth() == 1

    await one.close()
    await setup.put("late too", -1.0)
    assert await all_names(other) == ["late", "late too"]


async def test_an_outage_of_the_lane_is_waited_out(setup: Setup) -> None:
    worker = await setup.worker()
    await setup.put("late", -1.0)
    await setup.put("in time", 60.0)
    assert await next_name(worker) == "in time"
    setup.messenger.is_available = False
    await asyncio.sleep(3 * LATE_LANE_POLL_S)
    with pytest.raises(QueueUnavailable):
        for _ in range(3):
            await worker.get(0.1)
    setup.messenger.is_available = True
    await asyncio.sleep(5 * LATE_LANE_POLL_S)

    assert await all_names(worker) == ["late"]


async def test_the_prompt_in_hand_is_given_to_nobody_after_an_outage_of_a_moment(setup: Setup) -> None:
    worker = await setup.worker()
    await setup.put("late", -1.0)
    await setup.put("in time", 60.0)
    assert await next_name(worker) == "in time"
    await asyncio.sleep(0.1)
    assert worker._in_hand
    setup.messenger.is_available = False
    await asyncio.sleep(1.1 * LATE_LANE_POLL_S)
    setup.messenger.is_available = True
    await asyncio.sleep(5 * LATE_LANE_POLL_S)
    lane = await setup.messenger.queue(STREAM, LATE_LANE)
    assert await lane.get(0.0) is None
    assert await all_names(worker) == ["late"]


async def test_those_that_go_on_coming_late_do_not_keep_a_worker_idle(setup: Setup) -> None:
    worker = await setup.worker()

    async def keep_coming() -> None:
        for number in range(100):
            await setup.put(f"{number}", -1.0)
            await asyncio.sleep(0.05)

    coming = asyncio.create_task(keep_coming())
    done = [await next_name(worker) for _ in range(30)]
    assert len([name for name in done if name]) >= 20
    await coming


async def test_late_prompts_are_computed_one_after_the_other_when_nothing_is_in_time(setup: Setup) -> None:
    worker = await setup.worker()
    for number in range(20):
        await setup.put(f"{number}", -1.0)
    begun_s = setup.now_s()
    names = []
    while len(names) < 20:
        names += filter(None, [await next_name(worker)])

    assert names == [f"{number}" for number in range(20)]
    assert setup.now_s() - begun_s < 4.0
