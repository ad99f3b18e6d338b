"""A frontend's index follows its workers, through whatever happens to the events.

The workers here are the real publishers; only their HTTP server is left out: a snapshot is a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynaplan.engines.kv_events import (
    TOPIC,
    BlockChange,
    CachedBlocks,
    CacheSnapshot,
    Removed,
    Stored,
    kv_payload,
)
from dynaplan.events.component_events import ComponentEvents
from dynaplan.gateway.kv_routing.follower import KvCacheFollower
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import PermanentError, QueueUnavailable
from tests.fakes.memory_events import MemoryEventPlane
from tests.fakes.polling import consistently, eventually


class Snapshots:
    """The workers' caches; ``fetch`` waits at the gate with what it has read, or is refused."""

    def __init__(self) -> None:
        self.caches: dict[int, CachedBlocks] = {}
        self.refusals = 0
        self.fetched = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, instance: Instance) -> CacheSnapshot:
        self.fetched += 1
        if self.refusals:
            self.refusals -= 1
            raise ValueError("it answers with status 503")
        snapshot = self.caches[instance.instance_id].snapshot(instance.instance_id)
        await self.gate.wait()
        return snapshot

    async def close(self) -> None:
        self.gate.set()


class Box:
    """Workers, an event plane and a follower in one process."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.plane = MemoryEventPlane()
        self.discovery = Discovery(self.store, "ns")
        self.snapshots = Snapshots()
        self.caches = self.snapshots.caches
        self.fault: Exception | None = None
        self.follower = self.new_follower()

    def new_follower(self) -> KvCacheFollower:
        return KvCacheFollower(self.discovery, "ns", self.connect, self.snapshots)

    async def connect(self) -> ComponentEvents:
        if self.fault:
            raise self.fault
        if not self.plane.is_available:
            raise QueueUnavailable("the event plane is away")
        return ComponentEvents(self.plane.peer(), "ns", "Frontend")

    async def begin(self, worker: int, *blocks: int, component: str = "VllmWorker", **card: Any) -> None:
        """A worker registers; it holds these blocks already."""
        cache = self.caches[worker] = CachedBlocks()
        cache.events(worker, [Stored(None, blocks, blocks)])
        card = card or {"kv_events": {"block_tokens": 16}}
        instance = Instance(
            "ns", component, "generate", worker, "http://127.0.0.1:1", f"w{worker}", card=card
        )
        await self.store.put(instance.key, instance.to_json())
        await eventually(lambda: self.discovery.has(instance.key))

    async def end(self, worker: int, component: str = "VllmWorker") -> None:
        instance = Instance("ns", component, "generate", worker, "")
        await self.store.delete(instance.key)
        await eventually(lambda: not self.discovery.has(instance.key))

    async def tell(self, worker: int, *changes: BlockChange, is_lost: bool = False) -> None:
        """The worker's engine changes its blocks; the event is published, or lost."""
        events = self.caches[worker].events(worker, changes)
        if not is_lost:
            publisher = ComponentEvents(self.plane, "ns", "VllmWorker")
            await publisher.publish_serialized(TOPIC, kv_payload(events))

    async def until(self, worker: int, blocks: list[int], count: int) -> None:
        """Wait until the worker is known to hold so many of these blocks, and all that it told is known."""
        await eventually(
            lambda: (
                self.follower.is_current(worker) and self.follower.overlaps(blocks).get(worker, 0) == count
            )
        )

    async def close(self) -> None:
        await self.follower.close()
        await self.discovery.close()
        await self.plane.close()
        await self.store.close()


def stored(*blocks: int) -> Stored:
    return Stored(None, blocks, blocks)


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    made = Box()
    await made.discovery.start()
    yield made
    await made.close()


async def test_a_frontend_that_starts_late_knows_within_a_second_what_is_cached(box: Box) -> None:
    await box.begin(7, 1, 2)
    await box.begin(8, 1, component="PrefillWorker")
    box.follower.start()
    async with asyncio.timeout(1.0):
        await box.until(7, [1, 2, 3], 2)
        await box.until(8, [1, 2, 3], 1)


async def test_events_are_followed_from_the_snapshot_on(box: Box) -> None:
    box.follower.start()
    await box.begin(7, 1)
    await box.until(7, [1, 2], 1)
    await box.tell(7, stored(2))
    await box.until(7, [1, 2], 2)
    await box.tell(7, Removed((1,)), stored(3))
    await box.until(7, [1], 0)
    assert box.snapshots.fetched == 1


async def test_an_event_that_was_lost_is_noticed_at_the_next_and_the_worker_asked(box: Box) -> None:
    await box.begin(7, 1)
    box.follower.start()
    await box.until(7, [1], 1)
    await box.tell(7, stored(2), is_lost=True)
    await box.tell(7, Removed(()))
    await box.until(7, [1, 2], 2)
    assert box.snapshots.fetched == 2
    assert box.follower.metrics()["dynaplan:kv_index_gaps_total"] == 1


async def test_a_dead_workers_blocks_go_with_its_registration(box: Box) -> None:
    await box.begin(7, 1)
    await box.begin(8, 1)
    box.follower.start()
    await box.until(7, [1], 1)
    await box.until(8, [1], 1)
    await box.end(7)
    assert box.follower.overlaps([1]) == {8: 1}
    assert not box.follower.is_current(7)
    await box.end(8)
    await eventually(lambda: box.follower.metrics()["dynaplan:kv_index_blocks"] == 0)


async def test_a_new_instance_of_a_worker_begins_anew(box: Box) -> None:
    await box.begin(7, 1, 2)
    box.follower.start()
    await box.until(7, [1], 1)
    await box.end(7)
    await box.begin(9, 1)
    await box.until(9, [1, 2], 1)
    assert box.follower.publishing == (9,)


async def test_a_worker_that_does_not_publish_is_left_alone(box: Box) -> None:
    await box.begin(7, 1, model="m")
    await box.begin(8, 1, kv_events={"block_tokens": 0})
    box.follower.start()
    await box.begin(9, 1)
    await box.until(9, [1], 1)
    assert not box.follower.is_current(7)
    assert box.follower.publishing == (9,)


async def test_while_the_event_plane_is_away_nothing_is_current_and_it_heals_by_itself(box: Box) -> None:
    await box.begin(7, 1)
    box.follower.start()
    await box.until(7, [1], 1)
    box.plane.is_available = False
    assert not box.follower.is_current(7)
    assert box.follower.overlaps([1]) == {7: 1}
    await box.tell(7, stored(2), is_lost=True)
    box.plane.is_available = True
    await box.until(7, [1, 2], 2)


async def test_an_event_plane_that_comes_late_is_waited_for(box: Box) -> None:
    await box.begin(7, 1)
    box.plane.is_available = False
    box.follower.start()
    await consistently(lambda: not box.follower.is_current(7) and not box.snapshots.fetched, for_s=0.1)
    box.plane.is_available = True
    await box.until(7, [1], 1)


async def test_a_subscription_that_ends_is_reported_and_made_again(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    await box.begin(7, 1)
    box.follower.start()
    await box.until(7, [1], 1)
    [(_, inbox)] = box.plane._broker.inboxes
    await inbox.close()
    await eventually(lambda: not box.follower.is_current(7))
    await box.tell(7, stored(2), is_lost=True)
    await box.until(7, [1, 2], 2)
    assert "prefixes are predicted until the event plane answers: the subscription has ended" in caplog.text


async def test_a_worker_that_does_not_answer_is_asked_until_it_does(box: Box) -> None:
    box.snapshots.refusals = 1
    await box.begin(7, 1)
    box.follower.start()
    await box.until(7, [1], 1)
    assert box.snapshots.fetched == 2


async def test_a_worker_that_goes_while_it_is_asked_is_not_indexed(box: Box) -> None:
    box.snapshots.gate.clear()
    await box.begin(7, 1)
    box.follower.start()
    await eventually(lambda: box.snapshots.fetched)
    await box.end(7)
    box.snapshots.gate.set()
    await box.begin(8, 2)
    await box.until(8, [2], 1)
    assert box.follower.overlaps([1]) == {}


async def test_a_message_that_cannot_be_read_is_counted_and_skipped(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    await box.begin(7, 1)
    box.follower.start()
    await box.until(7, [1], 1)
    publisher = ComponentEvents(box.plane, "ns", "VllmWorker")
    for payload in (b"\xc1", b"\xc1", b"\x80"):
        await publisher.publish(TOPIC, payload)
    await box.tell(7, stored(2))
    await box.until(7, [1, 2], 2)
    assert box.follower.metrics()["dynaplan:kv_index_events_unreadable_total"] == 3
    assert caplog.text.count("cannot be read") == 2


async def test_a_frontend_that_the_event_plane_refuses_says_so_once(
    box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    box.fault = PermanentError("the token is wrong")
    await box.begin(7, 1)
    box.follower.start()
    await eventually(lambda: "prefixes are predicted: the token is wrong" in caplog.text)
    assert not box.follower.is_current(7)
