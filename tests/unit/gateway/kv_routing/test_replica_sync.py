"""Frontends that tell each other their bookings: what arrives, what is lost, who is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack

import pytest

from dynaplan.events.component_events import ComponentEvents
from dynaplan.gateway import timing
from dynaplan.gateway.kv_routing.replica_sync import (
    MAX_PEERS,
    MAX_PROMPT_BYTES,
    TOPIC,
    ActiveSequences,
    ReplicaSync,
    WorkerShare,
    shares,
)
from dynaplan.routing.booking import BookEntry, WorkerBook
from dynaplan.util.errors import QueueUnavailable
from tests.fakes import memory_events
from tests.fakes.memory_events import MemoryEventPlane
from tests.fakes.polling import eventually

WORKER = 7


class Frontend:
    """One frontend's books and its replica sync, on an event plane that all share."""

    def __init__(self, instance_id: int, plane: MemoryEventPlane) -> None:
        self.instance_id = instance_id
        self.books: Mapping[int, WorkerBook] = {WORKER: WorkerBook()}
        self.heard: list[tuple[list[int], int]] = []
        self._plane = plane
        self.is_plane_there = True
        self.sync = ReplicaSync(self)

    def record_remote_prompt(self, hashes: Sequence[int], instance_id: int) -> None:
        self.heard.append((list(hashes), instance_id))

    async def events(self) -> ComponentEvents:
        if not self.is_plane_there:
            raise QueueUnavailable("it is away")
        return ComponentEvents(self._plane, "ns", "Frontend")

    def book(self, blocks: int, overlap: int = 0) -> BookEntry:
        entry = BookEntry(self.books[WORKER], blocks, overlap)
        self.sync.notify()
        return entry

    @property
    def seen(self) -> tuple[int, int, int]:
        book = self.sync.others.get(WORKER, WorkerBook())
        return book.in_flight, book.active_blocks, book.prefill_blocks


@pytest.fixture
async def two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Frontend, Frontend]]:
    monkeypatch.setattr(timing, "REPLICA_HEARTBEAT_S", 0.05)
    plane = MemoryEventPlane()
    one, other = Frontend(1, plane), Frontend(2, plane)
    async with AsyncExitStack() as ends:
        for each in (one, other):
            each.sync.start()
            ends.push_async_callback(each.sync.close)
        await eventually(lambda: one.sync.peers == (2,) and other.sync.peers == (1,))
        yield one, other
    await plane.close()


async def test_a_booking_counts_at_the_other_frontend_until_its_end(two: tuple[Frontend, Frontend]) -> None:
    one, other = two
    first, second = one.book(10, 4), one.book(3)
    await eventually(lambda: other.seen == (2, 13, 9))
    first.finish_prefill()
    one.sync.notify()
    await eventually(lambda: other.seen == (2, 13, 3))
    first.close()
    second.close()
    one.sync.notify()
    await eventually(lambda: other.seen == (0, 0, 0))
    assert other.sync.others == {}
    assert one.seen == (0, 0, 0), "a frontend's own bookings are not counted twice"


async def test_prompts_that_are_predicted_from_are_told_once(two: tuple[Frontend, Frontend]) -> None:
    one, other = two
    one.sync.record_prompt([1, 2**64 - 1], WORKER)
    await eventually(lambda: other.heard == [([1, 2**64 - 1], WORKER)])
    one.book(1)
    await eventually(lambda: other.seen == (1, 1, 1))
    assert len(other.heard) == 1
    assert one.heard == []


async def test_a_silent_frontend_takes_its_bookings_with_it(
    two: tuple[Frontend, Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    one.book(10)
    await eventually(lambda: other.seen == (1, 10, 10))
    monkeypatch.setattr(timing, "REPLICA_SILENT_S", 0.2)
    await one.sync.close()
    await eventually(lambda: other.seen == (0, 0, 0))
    assert other.sync.peers == ()


async def test_a_silent_frontend_is_dropped_by_one_that_is_never_idle(
    two: tuple[Frontend, Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    one.book(10)
    await eventually(lambda: other.seen == (1, 10, 10))
    monkeypatch.setattr(timing, "REPLICA_SILENT_S", 0.2)
    monkeypatch.setattr(timing, "REPLICA_HEARTBEAT_S", 60.0)
    await one.sync.close()

    def is_dropped_under_load() -> bool:
        other.book(1).close()
        return other.sync.peers == ()

    await eventually(is_dropped_under_load)


@pytest.mark.parametrize("rogue", [WorkerShare(WORKER, -5, 0, 0), WorkerShare(WORKER, 1, 10**18, 0)])
async def test_numbers_that_cannot_be_are_not_believed(
    two: tuple[Frontend, Frontend], rogue: WorkerShare
) -> None:
    one, other = two
    events = await one.events()
    await events.publish_serialized(TOPIC, ActiveSequences(99, (rogue,)))
    one.book(10)
    await eventually(lambda: other.seen == (1, 10, 10))
    assert other.sync.peers == (1,)


async def test_a_flood_of_unknown_frontends_is_bounded_and_a_registered_one_is_heard(
    two: tuple[Frontend, Frontend],
) -> None:
    one, other = two
    events = await one.events()
    for frontend in range(1000, 1000 + 2 * MAX_PEERS):
        await events.publish_serialized(TOPIC, ActiveSequences(frontend))
    await eventually(lambda: len(other.sync.peers) == MAX_PEERS)
    other.sync.update_registrations([1, 2, 3, WORKER])
    await events.publish_serialized(TOPIC, ActiveSequences(3, (WorkerShare(WORKER, 1, 2, 2),)))
    await eventually(lambda: 3 in other.sync.peers)


async def test_a_frontend_whose_registration_has_gone_is_forgotten_at_once(
    two: tuple[Frontend, Frontend],
) -> None:
    one, other = two
    one.book(10)
    await eventually(lambda: other.seen == (1, 10, 10))
    other.sync.update_registrations([1, 2, WORKER])
    await one.sync.close()
    assert other.seen == (1, 10, 10)
    other.sync.update_registrations([2, WORKER])
    assert other.seen == (0, 0, 0)


async def test_a_frontend_that_is_not_registered_yet_is_heard_and_tells_nothing_without_an_id(
    two: tuple[Frontend, Frontend],
) -> None:
    one, other = two
    other.sync.update_registrations([2])
    one.book(10)
    await eventually(lambda: other.seen == (1, 10, 10))
    other.instance_id = 0
    other.book(5)
    await asyncio.sleep(0.1)
    assert one.seen == (0, 0, 0)


async def test_without_an_event_plane_a_frontend_goes_by_its_own_bookings_until_it_is_back() -> None:
    plane = MemoryEventPlane()
    one, other = Frontend(1, plane), Frontend(2, plane)
    other.is_plane_there = False
    one.sync.start()
    other.sync.start()
    one.book(4)
    await asyncio.sleep(0.05)
    assert other.seen == (0, 0, 0)
    other.is_plane_there = True
    await eventually(lambda: other.seen == (1, 4, 4))
    await one.sync.close()
    await other.sync.close()
    await plane.close()


async def test_of_the_prompts_of_an_outage_as_many_are_told_as_a_message_may_carry() -> None:
    plane = MemoryEventPlane()
    one, other = Frontend(1, plane), Frontend(2, plane)
    one.is_plane_there = False
    one.sync.start()
    other.sync.start()
    for _ in range(200):
        one.sync.record_prompt([5] * 8192, WORKER)
    one.is_plane_there = True
    one.book(4)
    await eventually(lambda: other.seen == (1, 4, 4))
    assert 0 < sum(8 * len(hashes) for hashes, _ in other.heard) <= MAX_PROMPT_BYTES
    one.sync.record_prompt([6], WORKER)
    await eventually(lambda: other.heard[-1] == ([6], WORKER))
    await one.sync.close()
    await other.sync.close()
    await plane.close()


async def test_a_message_that_the_server_refuses_is_lost_and_the_next_one_is_sent(
    two: tuple[Frontend, Frontend], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = two
    with monkeypatch.context() as changed:
        changed.setattr(memory_events, "MOST_BYTES", 1)
        one.book(4)
        await asyncio.sleep(0.05)
        assert other.seen == (0, 0, 0)
    await eventually(lambda: other.seen == (1, 4, 4))


def test_a_worker_without_requests_has_no_share() -> None:
    assert list(shares({7: WorkerBook(), 8: WorkerBook(1, 4, 2)})) == [WorkerShare(8, 1, 4, 2)]
