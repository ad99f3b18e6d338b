"""What a worker's service may use of its process: events, on one connection."""

from __future__ import annotations

from typing import Any

import pytest

from dynaplan.events.port import EventPlane
from dynaplan.util.errors import QueueUnavailable
from dynaplan.worker.worker_runtime import WorkerRuntime
from tests.fakes.memory_events import MemoryEventPlane
from tests.fakes.worker_runtime import worker_runtime


def runtime(**more: Any) -> WorkerRuntime:
    return worker_runtime(namespace="vllm-agg", component="backend", **more)


async def test_the_events_of_a_worker_are_its_components_and_counted_on_its_metrics() -> None:
    made: list[MemoryEventPlane] = []

    async def connect() -> EventPlane:
        made.append(MemoryEventPlane())
        return made[-1]

    worker = runtime(connect_events=connect)
    assert worker.metrics == {}
    events = await worker.events()
    assert await worker.events() is events
    subscription = await events.subscribe("kv_cache_update")
    await events.publish("kv_cache_update", b"x")
    assert (await anext(subscription)).subject == "vllm-agg.backend.kv_cache_update"
    assert worker.metrics["dynamo_component_events_published_total"] == 1
    assert len(made) == 1
    await worker.close()
    assert [event async for event in subscription] == []


async def test_a_server_that_is_away_is_asked_again_at_the_next_call() -> None:
    planes: list[MemoryEventPlane | None] = [None, MemoryEventPlane()]

    async def connect() -> EventPlane:
        plane = planes.pop(0)
        if plane is None:
            raise QueueUnavailable("away")
        return plane

    worker = runtime(connect_events=connect)
    with pytest.raises(QueueUnavailable, match="away"):
        await worker.events()
    assert await (await worker.events()).publish("stored", b"") == 0
    await worker.close()


async def test_a_process_without_an_event_plane_says_so() -> None:
    worker = runtime()
    with pytest.raises(QueueUnavailable, match="no event plane"):
        await worker.events()
    await worker.close()
