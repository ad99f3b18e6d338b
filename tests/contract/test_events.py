"""What every event plane promises: order, what is kept, what was missed; and what outages do to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from dynaplan.events.nats_messenger import NatsMessenger
from dynaplan.events.nats_plane import NatsEventPlane
from dynaplan.events.port import EventPlane, EventPublisher, EventSubscription
from dynaplan.events.subjects import KEPT, Event, Start, Subject
from dynaplan.util.errors import ConfigError, PermanentError
from tests.fakes.memory_events import MemoryEventPlane
from tests.fakes.polling import eventually, lasting
from tests.fakes.servers import Server, start_nats

Connect = Callable[[], Awaitable[EventPlane]]

COMPONENT = "backend"
EVENT_ACK_WAIT_S = 1.0


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes one more connection to the same event plane."""
    first = MemoryEventPlane(ack_wait_s=EVENT_ACK_WAIT_S)
    made: list[EventPlane] = []

    async def connect() -> EventPlane:
        if request.param == "memory":
            made.append(first.peer())
        else:
            server: Server = request.getfixturevalue("shared_nats")
            made.append(
                await NatsEventPlane.from_environment(server.environment, ack_wait_s=EVENT_ACK_WAIT_S)
            )
        return made[-1]

    yield connect
    for each in made:
        await each.close()
    if request.param == "nats":
        await remove_streams(request.getfixturevalue("shared_nats"))


async def remove_streams(server: Server) -> None:
    """Make room: the server sets some aside for each stream."""
    messenger = await NatsMessenger.from_environment(server.environment)
    async with messenger.call() as client:
        for found in await client.jsm().streams_info():
            await client.jsm().delete_stream(str(found.config.name))
    await messenger.close()


@pytest.fixture
async def plane(connect: Connect) -> EventPlane:
    return await connect()


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> str:
    return f"ns{abs(hash(request.node.name))}"


@pytest.fixture
def subject(namespace: str) -> Subject:
    return Subject(namespace, COMPONENT, "kv_cache_update")


@pytest.fixture
def nats(runtime_dir: Path) -> Iterator[Server]:
    """One of its own, to be killed."""
    server = start_nats(runtime_dir)
    yield server
    server.kill()


async def taken(subscription: EventSubscription, count: int, timeout_s: float = 30.0) -> list[Event]:
    events: list[Event] = []
    async with asyncio.timeout(timeout_s):
        while len(events) < count:
            events.append(await anext(subscription))
    return events


async def publish(publisher: EventPublisher, *payloads: bytes) -> None:
    for payload in payloads:
        await publisher.publish(payload)


def payloads(events: list[Event]) -> list[bytes]:
    return [event.payload for event in events]


# What comes


@pytest.mark.parametrize("is_kept", [True, False])
async def test_an_event_reaches_every_subscriber_of_its_subject(
    connect: Connect, subject: Subject, is_kept: bool
) -> None:
    patterns = (str(subject), f"{subject.namespace}.*.kv_cache_update", f"{subject.namespace}.>")
    heard = [await (await connect()).subscribe(pattern) for pattern in patterns]
    other = await (await connect()).subscribe(f"{subject.namespace}.frontend.kv_cache_update")
    await publish((await connect()).publisher(subject, is_kept=is_kept), b"\x00one", b"")
    for each in heard:
        events = await taken(each, 2)
        assert payloads(events) == [b"\x00one", b""]
        assert [event.subject for event in events] == [str(subject)] * 2
        assert [event.missed for event in events] == [0, 0]
    with pytest.raises(TimeoutError):
        await taken(other, 1, 0.2)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_the_events_of_each_publisher_keep_their_order(
    connect: Connect, subject: Subject, is_kept: bool
) -> None:
    subscription = await (await connect()).subscribe(str(subject))
    publishers = [(await connect()).publisher(subject, is_kept=is_kept) for _ in range(3)]
    for number in range(200):
        for publisher in publishers:
            assert await publisher.publish(b"%d" % number) == number
    events = await taken(subscription, 600)
    assert len({event.publisher for event in events}) == 3
    for publisher_id in {event.publisher for event in events}:
        own = [event for event in events if event.publisher == publisher_id]
        assert [int(event.payload) for event in own] == list(range(200))
        assert [event.sequence for event in own] == list(range(200))
        assert {event.missed for event in own} == {0}


async def test_a_publisher_may_come_before_and_after_its_subscriber(
    connect: Connect, subject: Subject
) -> None:
    early = (await connect()).publisher(subject, is_kept=False)
    await publish(early, b"unheard")
    await lasting(0.1)
    subscription = await (await connect()).subscribe(str(subject))
    await publish(early, b"early")
    await publish((await connect()).publisher(subject, is_kept=False), b"late")
    events = sorted(await taken(subscription, 2), key=lambda event: event.payload)
    assert [(event.payload, event.missed) for event in events] == [(b"early", 1), (b"late", 0)]


async def test_who_comes_late_is_told_how_many_events_it_has_missed(
    connect: Connect, subject: Subject
) -> None:
    publisher = (plane := await connect()).publisher(subject, is_kept=True)
    await publish(publisher, *[b"before"] * 57)
    assert await plane.flush(10)
    await lasting(0.05)
    late = await connect()
    subscription = await late.subscribe(str(subject))
    await publish(publisher, b"after", b"after")
    assert [(event.payload, event.missed) for event in await taken(subscription, 2)] == [
        (b"after", 57),
        (b"after", 0),
    ]
    assert late.counts()["missed"] == 57
    assert late.counts()["received"] == 2
    assert plane.counts()["published"] == 59


# What is kept


async def test_kept_events_come_to_a_late_subscriber_and_then_the_new_ones(
    connect: Connect, subject: Subject
) -> None:
    publisher = (plane := await connect()).publisher(subject, is_kept=True)
    await publish(publisher, *(b"%d" % number for number in range(1500)))
    assert await plane.flush(10)
    begun_s = time.monotonic()
    subscription = await (await connect()).subscribe(str(subject), KEPT)
    events = await taken(subscription, 1500)
    assert time.monotonic() - begun_s < 5.0  # alone on the machine: 0.1
    await publish(publisher, b"1500")
    events += await taken(subscription, 1)
    assert [int(event.payload) for event in events] == list(range(1501))
    assert {event.missed for event in events} == {0}


async def test_a_subscription_begins_at_a_position(connect: Connect, subject: Subject) -> None:
    publisher = (plane := await connect()).publisher(subject, is_kept=True)
    await publish(publisher, *(b"%d" % number for number in range(10)))
    assert await plane.flush(10)
    first = await taken(await (await connect()).subscribe(str(subject), KEPT), 10)
    again = await (await connect()).subscribe(str(subject), Start(position=first[6].position))
    events = await taken(again, 4)
    assert [int(event.payload) for event in events] == [6, 7, 8, 9]
    assert [event.missed for event in events] == [6, 0, 0, 0]


async def test_a_subscription_begins_at_a_time(connect: Connect, subject: Subject) -> None:
    publisher = (plane := await connect()).publisher(subject, is_kept=True)
    await publish(publisher, b"old", b"old")
    assert await plane.flush(10)
    await lasting(0.1)
    between_s = time.time()
    await lasting(0.1)
    await publish(publisher, b"new")
    assert await plane.flush(10)
    subscription = await (await connect()).subscribe(str(subject), Start(unix_s=between_s))
    assert payloads(await taken(subscription, 1)) == [b"new"]


async def test_the_kept_events_of_a_component_are_read_by_one_pattern(
    connect: Connect, namespace: str
) -> None:
    plane = await connect()
    for name in ("stored", "removed"):
        await publish(plane.publisher(Subject(namespace, COMPONENT, name), is_kept=True), name.encode())
    await publish(plane.publisher(Subject(namespace, "other", "stored"), is_kept=True), b"other")
    assert await plane.flush(10)
    subscription = await (await connect()).subscribe(f"{namespace}.{COMPONENT}.*", KEPT)
    assert sorted(payloads(await taken(subscription, 2))) == [b"removed", b"stored"]


async def test_a_subscriber_that_reads_nothing_for_a_while_gets_all_that_is_kept(
    connect: Connect, subject: Subject
) -> None:
    subscription = await (await connect()).subscribe(str(subject), KEPT)
    publisher = (plane := await connect()).publisher(subject, is_kept=True)
    for number in range(12_000):
        await publisher.publish(b"%06d" % number)
        if number % 500 == 0:
            await asyncio.sleep(0)
    assert await plane.flush(30)
    await lasting(0.3)
    events = await taken(subscription, 12_000, 60)
    assert [int(event.payload) for event in events] == list(range(12_000))


# Groups


async def test_an_event_goes_to_one_of_a_group_and_is_acknowledged(
    connect: Connect, subject: Subject
) -> None:
    publisher = (await connect()).publisher(subject, is_kept=True)
    members = [await (await connect()).subscribe(str(subject), KEPT, "indexers") for _ in range(2)]
    await publish(publisher, *(b"%d" % number for number in range(20)))
    heard: list[int] = []

    async def work(member: EventSubscription) -> None:
        async for event in member:
            await member.ack(event)
            heard.append(int(event.payload))

    tasks = [asyncio.create_task(work(member)) for member in members]
    await eventually(lambda: len(heard) >= 20)
    await lasting(1.5 * EVENT_ACK_WAIT_S)
    assert sorted(heard) == list(range(20))
    for member in members:
        await member.close()
    await asyncio.gather(*tasks)


async def test_an_event_that_was_not_acknowledged_comes_again(connect: Connect, subject: Subject) -> None:
    plane = await connect()
    first = await plane.subscribe(str(subject), KEPT, "indexers")
    await publish(plane.publisher(subject, is_kept=True), b"work")
    assert payloads(await taken(first, 1)) == [b"work"]
    await first.close()
    second = await (await connect()).subscribe(str(subject), KEPT, "indexers")
    (event,) = await taken(second, 1)
    assert event.payload == b"work"
    await second.ack(event)


# Ends and errors


async def test_a_closed_subscription_ends(plane: EventPlane, subject: Subject) -> None:
    subscription = await plane.subscribe(str(subject))
    waiting = asyncio.create_task(anext(subscription, None))
    await asyncio.sleep(0.05)
    await subscription.close()
    await subscription.close()
    assert await waiting is None


async def test_an_event_of_no_group_is_not_acknowledged(plane: EventPlane, subject: Subject) -> None:
    subscription = await plane.subscribe(str(subject))
    with pytest.raises(PermanentError, match="no group"):
        await subscription.ack(Event(str(subject), b""))


async def test_an_event_that_is_too_large_is_refused(plane: EventPlane, subject: Subject) -> None:
    publisher = plane.publisher(subject, is_kept=True)
    with pytest.raises(PermanentError, match="too large"):
        await publisher.publish(bytes(9 * 2**20))
    assert await publisher.publish(bytes(7 * 2**20)) == 0


async def test_kept_events_are_read_from_one_component(plane: EventPlane, namespace: str) -> None:
    with pytest.raises(ConfigError, match="without wildcards"):
        await plane.subscribe(f"{namespace}.*.stored", KEPT)
