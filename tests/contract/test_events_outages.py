"""Event planes whose server is killed, frozen or wiped."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from nats.aio.msg import Msg

from dynaplan.events.nats_messenger import NatsMessenger
from dynaplan.events.nats_plane import EVENT_ACK_WAIT_S, NatsEventPlane
from dynaplan.events.port import EventPlane, EventSubscription
from dynaplan.events.subjects import KEPT, Event, Start, Subject
from dynaplan.events.wire_formats import DynamoFormat
from dynaplan.store.nats_connection import NatsConnection
from dynaplan.util.errors import QueueUnavailable
from tests.fakes.memory_events import MemoryEventPlane
from tests.fakes.polling import eventually, lasting
from tests.fakes.servers import Server

SUBJECT = Subject("outage", "backend", "kv_cache_update")


class Reader:
    """Takes the events of a subscription."""

    def __init__(self, subscription: EventSubscription) -> None:
        self.events: list[Event] = []
        self._task = asyncio.create_task(self._read(subscription))

    async def _read(self, subscription: EventSubscription) -> None:
        async for event in subscription:
            self.events.append(event)

    @property
    def payloads(self) -> list[bytes]:
        return [event.payload for event in self.events]

    @property
    def numbers(self) -> list[int]:
        return [int(event.payload) for event in self.events]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def planes(nats: Server) -> AsyncIterator[Callable[..., object]]:
    """Makes connections to a server of the test's own, and ends them."""
    made: list[EventPlane] = []

    async def connect(**options: object) -> NatsEventPlane:
        made.append(plane := await NatsEventPlane.from_environment(nats.environment, **options))  # type: ignore[arg-type]
        return plane

    yield connect
    for each in made:
        await each.close()


# NATS


@pytest.mark.parametrize("is_kept", [True, False])
async def test_what_is_published_while_the_server_is_away_is_sent_when_it_is_back(
    nats: Server, planes: Callable[..., object], is_kept: bool
) -> None:
    publishing, reading = await planes(), await planes()
    reader = Reader(await reading.subscribe(str(SUBJECT), KEPT if is_kept else Start()))
    publisher = publishing.publisher(SUBJECT, is_kept=is_kept)
    for round_ in range(3):
        await publisher.publish(b"%d" % (2 * round_))
        assert await publishing.flush(10)
        await eventually(lambda expected=2 * round_ + 1: len(reader.events) == expected)
        nats.kill()
        await eventually(lambda: not publishing.is_connected and not reading.is_connected)
        await publisher.publish(b"%d" % (2 * round_ + 1))
        assert not await publishing.flush(0.1)
        assert publishing.counts()["waiting"] == 1
        await nats.start_again()
        await eventually(lambda: is_kept or reading.is_connected)
        assert await publishing.flush(20)
        if is_kept:
            await eventually(lambda expected=2 * round_ + 2: len(reader.events) == expected)
    await eventually(lambda: reader.numbers == sorted(set(reader.numbers)))
    if is_kept:
        assert reader.numbers == list(range(6))
    assert publishing.counts()["dropped"] == 0


async def test_beyond_a_bound_the_oldest_are_dropped_and_counted_and_missed(
    nats: Server, planes: Callable[..., object]
) -> None:
    publishing, reading = await planes(), await planes()
    publisher = publishing.publisher(SUBJECT, is_kept=True)
    await publisher.publish(b"0")
    assert await publishing.flush(10)
    nats.kill()
    await eventually(lambda: not publishing.is_connected)
    for number in range(1, 17_000):
        await publisher.publish(b"%d" % number)
    dropped = publishing.counts()["dropped"]
    assert dropped == 16_999 - 16_384
    await nats.start_again()
    assert await publishing.flush(30)
    reader = Reader(await reading.subscribe(str(SUBJECT), KEPT))
    await eventually(lambda: len(reader.events) == 17_000 - dropped)
    assert [event.missed for event in reader.events if event.missed] == [dropped]


async def test_what_a_lost_connection_had_not_sent_is_not_sent_on_the_next_one(nats: Server) -> None:
    """It would come before what was lost on the way, which is sent again."""
    sending = await NatsConnection.from_environment(nats.environment)
    reading = await NatsConnection.from_environment(nats.environment)
    seen: list[bytes] = []

    async def note(message: Msg) -> None:
        seen.append(message.data[:5])

    await reading.add_subscription("numbers", note)
    nats.freeze()
    async with sending.call() as client:
        for _ in range(100):  # more than the sockets hold
            await client.publish("others", bytes(500_000))
            await asyncio.sleep(0)
        await client.publish("numbers", b"late")
        assert client.pending_data_size > 0
    nats.kill()
    await eventually(lambda: not sending.is_connected and not reading.is_connected)
    await nats.start_again()
    await eventually(lambda: sending.is_connected and reading.is_connected)
    await sending.publish("numbers", b"after")
    await eventually(lambda: seen)
    assert seen == [b"after"]
    await sending.close()
    await reading.close()


async def test_of_ten_thousand_kept_events_with_random_outages_all_arrive_in_order(
    nats: Server, planes: Callable[..., object]
) -> None:
    dice = random.Random(int(os.environ.get("DYNAPLAN_SEED", "12")))
    reader = Reader(await (await planes()).subscribe(str(SUBJECT), KEPT))
    publishers = [(plane := await planes(), plane.publisher(SUBJECT, is_kept=True)) for _ in range(2)]

    async def publish() -> None:
        for number in range(5000):
            for _, publisher in publishers:
                await publisher.publish(b"%d" % number)
            if number % 20 == 0:
                await asyncio.sleep(0.005)

    publishing = asyncio.create_task(publish())
    for fault in dice.sample(["kill", "freeze", "kill"], 3):
        await lasting(dice.uniform(0.1, 0.4))
        if fault == "kill":
            nats.kill()
            await lasting(dice.uniform(0.0, 0.3))
            await nats.start_again()
        else:
            nats.freeze()
            await lasting(dice.uniform(0.2, 3.0))
            nats.thaw()
    await publishing
    for plane, _ in publishers:
        assert await plane.flush(30)
        assert plane.counts()["dropped"] == 0
    await eventually(lambda: len(reader.events) >= 10_000)
    for publisher_id in {event.publisher for event in reader.events}:
        own = [int(event.payload) for event in reader.events if event.publisher == publisher_id]
        assert own == list(range(5000))
    assert {event.missed for event in reader.events} == {0}


async def test_a_server_that_comes_back_empty_gets_its_stream_again_and_readers_go_on(
    nats: Server, planes: Callable[..., object]
) -> None:
    publishing, reading = await planes(), await planes()
    reader = Reader(await reading.subscribe(str(SUBJECT), KEPT))
    publisher = publishing.publisher(SUBJECT, is_kept=True)
    for number in range(10):
        await publisher.publish(b"%d" % number)
    await eventually(lambda: len(reader.events) == 10)
    nats.kill()
    nats.wipe()
    await nats.start_again()
    for number in range(10, 13):
        await publisher.publish(b"%d" % number)
    await eventually(lambda: len(reader.events) == 13)
    assert reader.numbers == list(range(13))
    assert {event.missed for event in reader.events} == {0}


async def test_a_stream_that_somebody_deleted_is_made_again(
    nats: Server, planes: Callable[..., object]
) -> None:
    publishing, reading = await planes(), await planes()
    reader = Reader(await reading.subscribe(str(SUBJECT), KEPT))
    publisher = publishing.publisher(SUBJECT, is_kept=True)
    await publisher.publish(b"0")
    await eventually(lambda: reader.payloads == [b"0"])
    messenger = await NatsMessenger.from_environment(nats.environment)
    async with messenger.call() as client:
        await client.jsm().delete_stream("outage_backend_events")
    await messenger.close()
    await publisher.publish(b"1")
    assert await publishing.flush(10)
    await eventually(lambda: reader.payloads == [b"0", b"1"])


async def test_a_stream_keeps_events_for_the_time_that_the_environment_says(nats: Server) -> None:
    plane = await NatsEventPlane.from_environment({**nats.environment, "DYN_NATS_STREAM_MAX_AGE": "77"})
    for event in ("stored", "removed"):
        await plane.publisher(Subject("outage", "backend", event), is_kept=True).publish(b"x")
    assert await plane.flush(10)
    messenger = await NatsMessenger.from_environment(nats.environment)
    async with messenger.call() as client:
        config = (await client.jsm().stream_info("outage_backend_events")).config
    assert config.max_age == 77
    assert config.subjects == ["outage.backend.removed", "outage.backend.stored"]
    await messenger.close()
    await plane.close()


async def test_a_group_goes_on_after_a_restart_and_a_wipe(
    nats: Server, planes: Callable[..., object]
) -> None:
    publishing = await planes()
    member = await (await planes(ack_wait_s=1.0)).subscribe(str(SUBJECT), KEPT, "indexers")
    publisher = publishing.publisher(SUBJECT, is_kept=True)
    for number, is_wiped in enumerate((False, False, True, False)):
        if number:
            nats.kill()
            if is_wiped:
                nats.wipe()
            await nats.start_again()
        await publisher.publish(b"%d" % number)
        async with asyncio.timeout(30):
            event = await anext(member)
            while event.payload != b"%d" % number:
                event = await anext(member)  # what was acknowledged just before the server died
        assert event.subject == str(SUBJECT)
        await member.ack(event)


async def test_an_event_that_a_member_waits_for_no_more_goes_to_another_at_once(
    planes: Callable[..., object],
) -> None:
    first = await (await planes()).subscribe(str(SUBJECT), KEPT, "indexers")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await anext(first)
    second = await (plane := await planes()).subscribe(str(SUBJECT), KEPT, "indexers")
    await plane.publisher(SUBJECT, is_kept=True).publish(b"work")
    async with asyncio.timeout(EVENT_ACK_WAIT_S / 2):
        assert (await anext(second)).payload == b"work"


async def test_a_plain_message_of_another_program_is_an_event_without_a_number(
    nats: Server, planes: Callable[..., object]
) -> None:
    plane = await planes()
    reader = Reader(await plane.subscribe(str(SUBJECT)))
    messenger = await NatsMessenger.from_environment(nats.environment)
    for payload in (b"one", b"one"):
        await messenger.publish(str(SUBJECT), payload)
    await eventually(lambda: len(reader.events) == 2)
    assert [(event.publisher, event.sequence, event.missed) for event in reader.events] == [(0, 0, 0)] * 2
    await messenger.close()


async def test_in_the_originals_form_what_is_no_envelope_is_named_once_and_skipped(
    nats: Server, planes: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    plane = await planes(wire=DynamoFormat())
    reader = Reader(await plane.subscribe(str(SUBJECT)))
    messenger = await NatsMessenger.from_environment(nats.environment)
    for _ in range(3):
        await messenger.publish("namespace.outage.component.backend.kv-events", b"garbage")
    await plane.publisher(SUBJECT, is_kept=True).publish(b"event")
    await eventually(lambda: reader.payloads == [b"event"])
    assert reader.events[0].subject == str(SUBJECT)
    assert plane.counts()["unreadable"] == 3
    assert caplog.text.count("skipping what is no event") == 1
    kept = Reader(await plane.subscribe(str(SUBJECT), KEPT))
    await eventually(lambda: kept.payloads == [b"event"])
    await messenger.close()


async def test_a_subscription_of_two_patterns_of_which_one_fails_leaves_none(
    planes: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = await planes(wire=DynamoFormat())
    connection = plane._connection
    add_subscription = connection.add_subscription

    async def add_one(subject: str, handler: Callable[[Msg], Any]) -> int:
        if connection._handlers:
            raise QueueUnavailable("it is frozen")
        number: int = await add_subscription(subject, handler)
        return number

    monkeypatch.setattr(connection, "add_subscription", add_one)
    with pytest.raises(QueueUnavailable):
        await plane.subscribe(str(SUBJECT))
    await eventually(lambda: not connection._handlers)


async def test_after_the_attempts_that_are_allowed_a_server_is_given_up(
    nats: Server, caplog: pytest.LogCaptureFixture
) -> None:
    patient = await NatsMessenger.from_environment(nats.environment)
    impatient = [await NatsMessenger.from_environment(nats.environment, most) for most in (0, 2)]
    nats.kill()
    await eventually(lambda: caplog.text.count("NATS is given up") == 2)
    await nats.start_again()
    await eventually(lambda: patient.is_connected)
    for messenger in impatient:
        with pytest.raises(QueueUnavailable, match="did not come back in"):
            await messenger.publish("a", b"")
        await messenger.close()
    await patient.close()


# Memory


async def test_the_plane_in_memory_can_be_away() -> None:
    plane = MemoryEventPlane()
    publisher = plane.publisher(SUBJECT, is_kept=True)
    plane.is_available = False
    for _ in range(20_000):
        await publisher.publish(b"x")
    assert plane.counts()["waiting"] == 16_384
    assert plane.counts()["dropped"] == 20_000 - 16_384
    with pytest.raises(QueueUnavailable):
        await plane.subscribe(str(SUBJECT))
    plane.is_available = True
    assert await plane.flush(10)
    reader = Reader(await plane.subscribe(str(SUBJECT), KEPT))
    await eventually(lambda: len(reader.events) == 16_384)
    assert reader.events[0].missed == 20_000 - 16_384
    await plane.close()
