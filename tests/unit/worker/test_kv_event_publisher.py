"""A worker publishes what its engine tells of its blocks: numbered, in few messages, and whole when asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from dynaplan.engines.kv_events import CacheSnapshot, Cleared, KvEvent, Removed, Stored, read_kv_payload
from dynaplan.events.port import EventPlane, EventSubscription
from dynaplan.events.wire_formats import payload_reader
from dynaplan.util.errors import PermanentError, QueueUnavailable
from dynaplan.worker import kv_event_publisher
from dynaplan.worker.kv_event_publisher import KV_EVENT_QUIET_S, KV_EVENT_RETRY_MIN_S, KvEventPublisher
from tests.fakes.memory_events import MemoryEventPlane
from tests.fakes.worker_runtime import worker_runtime

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

QUIET = Removed(())


class Published:
    """A worker with instance id 7, its event plane, and the messages that a frontend gets."""

    def __init__(self) -> None:
        self.plane = MemoryEventPlane()
        self.runtime = worker_runtime(connect_events=self.connect)
        self.runtime.instance_id = 7
        self.publisher = KvEventPublisher(self.runtime)
        self.frontend: EventSubscription
        self.refusal: Exception | None = None

    async def connect(self) -> EventPlane:
        if self.refusal:
            raise self.refusal
        if not self.plane.is_available:
            raise QueueUnavailable("away")
        return self.plane.peer()

    async def next(self) -> list[KvEvent]:
        """The events of the next message."""
        event = await anext(self.frontend)
        assert event.subject == "ns.VllmWorker.kv_cache_update"
        return list(read_kv_payload(payload_reader(object)(event.payload)))

    async def snapshot(self) -> CacheSnapshot:
        (route,) = self.publisher.routes()
        assert (route.path, route.is_open, route.is_work) == ("/kv_blocks", False, False)
        response: Any = await route.handler(None)
        return CacheSnapshot.of(response.headers, response.body)


def stored(*blocks: int) -> Stored:
    return Stored(None, blocks, blocks)


@pytest.fixture
async def published() -> AsyncIterator[Published]:
    made = Published()
    made.frontend = await made.plane.subscribe("ns.*.kv_cache_update")
    yield made
    await made.runtime.close()
    await made.plane.close()


async def test_the_changes_of_a_step_are_one_message(published: Published) -> None:
    published.runtime.spawn(published.publisher.run(), "KV events")
    published.publisher.changed([Removed((9,)), stored(1, 2)])
    assert await published.next() == [KvEvent(7, 0, Removed((9,))), KvEvent(7, 1, stored(1, 2))]
    assert await published.snapshot() == CacheSnapshot(7, 1, (1, 2))
    assert published.publisher.metrics()["dynaplan:kv_block_events_total"] == 2


async def test_when_it_has_become_quiet_one_event_without_blocks_follows(published: Published) -> None:
    published.runtime.spawn(published.publisher.run(), "KV events")
    published.publisher.changed([stored(1)])
    await published.next()
    begun_s = asyncio.get_running_loop().time()
    assert await published.next() == [KvEvent(7, 1, QUIET)]
    assert asyncio.get_running_loop().time() - begun_s == pytest.approx(KV_EVENT_QUIET_S)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(10 * KV_EVENT_QUIET_S):
            await published.next()


async def test_before_the_worker_has_an_instance_id_nothing_is_published_and_the_blocks_are_known(
    published: Published,
) -> None:
    published.runtime.instance_id = 0
    published.publisher.changed([stored(1)])
    published.runtime.instance_id = 7
    assert await published.snapshot() == CacheSnapshot(7, -1, (1,))
    published.runtime.spawn(published.publisher.run(), "KV events")
    published.publisher.changed([stored(2)])
    assert await published.next() == [KvEvent(7, 0, stored(2))]


async def test_events_wait_for_an_event_plane_that_is_away(published: Published) -> None:
    published.plane.is_available = False
    published.runtime.spawn(published.publisher.run(), "KV events")
    published.publisher.changed([stored(1)])
    await asyncio.sleep(KV_EVENT_RETRY_MIN_S)
    published.publisher.changed([Cleared()])
    published.plane.is_available = True
    assert await published.next() == [KvEvent(7, 0, stored(1)), KvEvent(7, 1, Cleared())]


async def test_too_many_waiting_events_are_dropped_so_that_frontends_notice(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "MAX_WAITING_EVENTS", 2)
    for block in range(4):
        published.publisher.changed([stored(block)])
    published.runtime.spawn(published.publisher.run(), "KV events")
    assert await published.next() == [KvEvent(7, 3, stored(3))]
    assert await published.snapshot() == CacheSnapshot(7, 3, (0, 1, 2, 3))


async def test_messages_have_a_bounded_number_of_blocks(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_event_publisher, "MAX_MESSAGE_BLOCKS", 3)
    published.publisher.changed([stored(1, 2), stored(3), stored(4, 5)])
    published.runtime.spawn(published.publisher.run(), "KV events")
    messages = [[event.event_id for event in await published.next()] for _ in range(2)]
    assert messages == [[0, 1], [2]]


async def test_a_worker_that_the_event_plane_refuses_serves_on_without_events(
    published: Published, caplog: pytest.LogCaptureFixture
) -> None:
    published.refusal = PermanentError("the token is wrong")
    published.publisher.changed([stored(1)])
    await published.publisher.run()
    assert "prefixes are predicted: the token is wrong" in caplog.text
    assert not published.runtime.failed.done()
    assert await published.snapshot() == CacheSnapshot(7, 0, (1,))
