"""The events of a component: subjects, values, and messages that cannot be read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from dynaplan.events.component_events import ComponentEvents
from dynaplan.events.subjects import KEPT
from dynaplan.util.errors import ConfigError
from tests.fakes.memory_events import MemoryEventPlane


@dataclass
class Stored:
    blocks: list[int]
    parent: int | None = None


@pytest.fixture
async def plane() -> AsyncIterator[MemoryEventPlane]:
    plane = MemoryEventPlane(ack_wait_s=0.1)
    yield plane
    await plane.close()


@pytest.fixture
def backend(plane: MemoryEventPlane) -> ComponentEvents:
    return ComponentEvents(plane, "vllm-agg", "backend")


@pytest.fixture
def frontend(plane: MemoryEventPlane) -> ComponentEvents:
    return ComponentEvents(plane.peer(), "vllm-agg", "Frontend")


async def test_a_topic_is_an_own_event_or_a_whole_subject(
    backend: ComponentEvents, frontend: ComponentEvents
) -> None:
    own = await backend.subscribe("kv_cache_update")
    anothers = await frontend.subscribe("vllm-agg.*.kv_cache_update")
    assert [await backend.publish("kv_cache_update", payload) for payload in (b"1", b"2")] == [0, 1]
    for subscription in (own, anothers):
        events = [await anext(subscription) for _ in range(2)]
        assert [(event.subject, event.payload) for event in events] == [
            ("vllm-agg.backend.kv_cache_update", b"1"),
            ("vllm-agg.backend.kv_cache_update", b"2"),
        ]


async def test_values_travel_with_their_type(backend: ComponentEvents, frontend: ComponentEvents) -> None:
    await backend.publish_serialized("stored", Stored([1, 2**64 - 1]), is_kept=True)
    await backend.publish_serialized("stored", {"blocks": [], "parent": 3}, is_kept=True)
    subscription = await frontend.subscribe_typed("vllm-agg.backend.stored", Stored, KEPT)
    values = [(await anext(subscription)).value for _ in range(2)]
    assert values == [Stored([1, 2**64 - 1]), Stored([], 3)]
    await subscription.close()
    assert [each async for each in subscription] == []


async def test_what_cannot_be_read_is_named_once_counted_and_skipped(
    backend: ComponentEvents, frontend: ComponentEvents, caplog: pytest.LogCaptureFixture
) -> None:
    subscription = await frontend.subscribe_typed("vllm-agg.backend.stored", Stored)
    for _ in range(3):
        await backend.publish("stored", b"\xc1")
    await backend.publish_serialized("stored", {"blocks": "none"})
    await backend.publish_serialized("stored", Stored([4]))
    event = await anext(subscription)
    assert (event.value, event.event.sequence) == (Stored([4]), 4)
    assert caplog.text.count("cannot be read") == 2
    metrics = frontend.metrics()
    assert metrics["dynamo_component_events_unreadable_total"] == 4
    assert metrics["dynamo_component_events_received_total"] == 5
    assert backend.metrics()["dynamo_component_events_published_total"] == 5
    assert backend.metrics()["dynamo_component_events_waiting"] == 0


async def test_a_group_does_not_get_an_unreadable_event_again(
    backend: ComponentEvents, frontend: ComponentEvents
) -> None:
    await backend.publish("stored", b"\xc1", is_kept=True)
    await backend.publish_serialized("stored", Stored([1]), is_kept=True)
    member = await frontend.subscribe_typed("vllm-agg.backend.stored", Stored, KEPT, "indexers")
    event = await anext(member)
    await member.ack(event)
    assert event.value == Stored([1])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await anext(member)


async def test_a_name_that_is_no_event_is_refused(backend: ComponentEvents) -> None:
    for name in ("", "a.b", "*"):
        with pytest.raises(ConfigError, match="cannot be a part"):
            await backend.publish(name, b"")
    with pytest.raises(TypeError):
        await backend.publish_serialized("stored", object())
