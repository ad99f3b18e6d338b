"""What every messenger and work queue promises, and what the real one promises about outages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from dynaplan.events import nats_messenger
from dynaplan.events.nats_messenger import NatsMessenger
from dynaplan.events.port import Messenger, WorkItem, WorkQueue
from dynaplan.store.nats_connection import connect_options
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import PermanentError, QueueUnavailable
from tests.fakes import memory_messenger
from tests.fakes.memory_messenger import MemoryMessenger
from tests.fakes.polling import eventually, lasting
from tests.fakes.servers import Server, start_nats

Connect = Callable[[], Awaitable[Messenger]]


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Makes one more connection to the same server."""
    first = MemoryMessenger(SystemClock())
    made: list[Messenger] = []

    async def connect() -> Messenger:
        if request.param == "memory":
            made.append(first.peer())
        else:
            server: Server = request.getfixturevalue("shared_nats")
            made.append(await NatsMessenger.from_environment(server.environment))
        return made[-1]

    yield connect
    for each in made:
        await each.close()


@pytest.fixture
async def messenger(connect: Connect) -> Messenger:
    return await connect()


@pytest.fixture
async def queue(messenger: Messenger, request: pytest.FixtureRequest) -> WorkQueue:
    return await messenger.queue(f"queue_{abs(hash(request.node.name))}")


@pytest.fixture
async def other_queue(connect: Connect, queue: WorkQueue, request: pytest.FixtureRequest) -> WorkQueue:
    """The same queue as another process sees it."""
    return await (await connect()).queue(f"queue_{abs(hash(request.node.name))}")


@pytest.fixture
def nats(runtime_dir: Path) -> Iterator[Server]:
    """One of its own, to be killed."""
    server = start_nats(runtime_dir)
    yield server
    server.kill()


@pytest.fixture
async def own(nats: Server) -> AsyncIterator[NatsMessenger]:
    """A connection to that server."""
    made = await NatsMessenger.from_environment(nats.environment)
    yield made
    await made.close()


@pytest.fixture
async def own_queue(own: NatsMessenger) -> WorkQueue:
    return await own.queue("q")


async def taken(queue: WorkQueue, timeout_s: float = 5.0) -> WorkItem:
    item = await queue.get(timeout_s)
    assert item is not None
    return item


def now_s() -> float:
    return asyncio.get_running_loop().time()


# Messages


async def test_work_that_nobody_has_acknowledged_for_long_is_dropped(
    messenger: Messenger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for twin in (nats_messenger, memory_messenger):
        monkeypatch.setattr(twin, "QUEUE_MAX_AGE_S", 0.2)
    queue = await messenger.queue("queue_of_old_work")
    await queue.put(b"old")

    async def is_dropped() -> bool:
        return await queue.depth() == 0

    await eventually(is_dropped)


async def test_a_message_reaches_every_listener_of_its_subject(connect: Connect) -> None:
    heard: list[tuple[int, str, bytes]] = []

    def listen(number: int) -> Callable[[str, bytes], None]:
        return lambda subject, payload: heard.append((number, subject, payload))

    for number, subject in enumerate(("a.b", "a.b", "a.>", "a.*", "a.c", "b.>")):
        await (await connect()).subscribe(subject, listen(number))
    await (await connect()).publish("a.b", b"\x00hello")
    await eventually(lambda: len(heard) == 4)
    assert sorted(heard) == [(number, "a.b", b"\x00hello") for number in range(4)]


async def test_messages_keep_their_order(messenger: Messenger, connect: Connect) -> None:
    heard: list[int] = []
    await messenger.subscribe("order", lambda subject, payload: heard.append(int(payload)))
    sender = await connect()
    for number in range(100):
        await sender.publish("order", str(number).encode())
    await eventually(lambda: len(heard) == 100)
    assert heard == list(range(100))


async def test_a_message_that_nobody_listens_to_does_not_raise(messenger: Messenger) -> None:
    await messenger.publish("nobody", b"hello")


async def test_a_closed_messenger_says_so(messenger: Messenger) -> None:
    await messenger.close()
    with pytest.raises(QueueUnavailable):
        await messenger.publish("a", b"")


# Work


async def test_work_is_delivered_in_order_and_each_piece_once(queue: WorkQueue) -> None:
    sequences = [await queue.put(str(number).encode()) for number in range(5)]
    assert sequences == sorted(set(sequences))
    items = [await taken(queue) for _ in range(5)]
    assert [item.payload for item in items] == [b"0", b"1", b"2", b"3", b"4"]
    for item in items:
        await item.ack()
    assert await queue.get(0.1) is None
    assert await queue.depth() == 0


async def test_an_empty_queue_is_none_at_the_end_of_the_time(queue: WorkQueue) -> None:
    begun_s = now_s()
    assert await queue.get(0.5) is None
    assert 0.4 < now_s() - begun_s < 1.5
    assert await queue.get(0.0) is None


async def test_work_that_is_there_is_got_without_any_waiting_time(queue: WorkQueue) -> None:
    await queue.put(b"work")
    assert (await taken(queue, 0.0)).payload == b"work"


async def test_who_waits_gets_work_as_soon_as_it_comes(queue: WorkQueue, other_queue: WorkQueue) -> None:
    waiting = asyncio.create_task(queue.get(10.0))
    await asyncio.sleep(0.1)
    begun_s = now_s()
    await other_queue.put(b"work")
    item = await waiting
    assert item is not None
    assert now_s() - begun_s < 1.0
    await item.ack()


async def test_a_piece_of_work_goes_to_one_of_many(queue: WorkQueue, other_queue: WorkQueue) -> None:
    waiting = [asyncio.create_task(each.get(1.0)) for each in (queue, other_queue, queue, other_queue)]
    await asyncio.sleep(0.1)
    for number in range(3):
        await queue.put(str(number).encode())
    items = await asyncio.gather(*waiting)
    assert sorted(item.payload for item in items if item is not None) == [b"0", b"1", b"2"]


async def test_depth_counts_what_waits_and_what_is_taken_but_not_done(queue: WorkQueue) -> None:
    assert await queue.depth() == 0
    for _ in range(3):
        await queue.put(b"work")
    assert await queue.depth() == 3
    item = await taken(queue)
    assert await queue.depth() == 3
    await item.ack()
    assert await queue.depth() == 2


async def test_removed_work_is_not_delivered_and_not_counted(queue: WorkQueue) -> None:
    first, second = await queue.put(b"1"), await queue.put(b"2")
    await queue.remove(first)
    assert await queue.depth() == 1
    assert (await taken(queue)).payload == b"2"
    await queue.remove(second)
    await queue.remove(second)
    await queue.remove(12345)
    assert await queue.depth() == 0


async def test_work_of_one_who_died_comes_back_in_three_seconds(
    queue: WorkQueue, other_queue: WorkQueue
) -> None:
    await queue.put(b"work")
    await taken(queue)
    begun_s = now_s()
    item = await taken(other_queue, 10.0)
    assert 2.0 < now_s() - begun_s < 4.5
    await item.ack()


async def test_work_that_goes_on_stays_with_who_has_it(queue: WorkQueue, other_queue: WorkQueue) -> None:
    await queue.put(b"work")
    item = await taken(queue)
    for _ in range(5):
        assert await other_queue.get(0.8) is None
        await item.in_progress()
    await item.ack()
    assert await queue.depth() == 0


async def test_work_that_nobody_waits_for_any_more_goes_to_another_at_once(
    queue: WorkQueue, other_queue: WorkQueue
) -> None:
    given_up = asyncio.create_task(queue.get(30.0))
    await asyncio.sleep(0.2)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    await other_queue.put(b"work")
    begun_s = now_s()
    item = await taken(other_queue)
    assert now_s() - begun_s < 1.0
    await item.ack()


async def test_work_is_not_given_to_one_who_has_left(
    connect: Connect, queue: WorkQueue, request: pytest.FixtureRequest
) -> None:
    leaver = await connect()
    left = asyncio.create_task((await leaver.queue(f"queue_{abs(hash(request.node.name))}")).get(30.0))
    await asyncio.sleep(0.2)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await leaver.close()
    await queue.put(b"work")
    begun_s = now_s()
    await (await taken(queue)).ack()
    assert now_s() - begun_s < 1.0


async def test_a_queue_is_the_same_for_all_and_made_once(queue: WorkQueue, other_queue: WorkQueue) -> None:
    await queue.put(b"work")
    assert await other_queue.depth() == 1


async def test_the_memory_server_can_be_away() -> None:
    messenger = MemoryMessenger(SystemClock())
    queue = await messenger.queue("q")
    messenger.is_available = False
    for call in (messenger.publish("a", b""), queue.put(b""), queue.get(1.0), queue.depth()):
        with pytest.raises(QueueUnavailable):
            await call


# Outages of NATS


async def test_a_killed_nats_is_an_error_at_once_and_a_restarted_one_goes_on(
    nats: Server, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[bytes] = []
    messenger, listener = [await NatsMessenger.from_environment(nats.environment) for _ in range(2)]
    await listener.subscribe("news", lambda subject, payload: heard.append(payload))
    queue = await messenger.queue("q")
    await queue.put(b"kept")
    for round_ in range(3):
        nats.kill()
        await eventually(lambda: not messenger.is_connected)
        for call in (messenger.publish("news", b"lost"), queue.put(b"lost"), queue.depth(), queue.get(0.0)):
            begun_s = now_s()
            with pytest.raises(QueueUnavailable):
                await call
            assert now_s() - begun_s < 0.5
        await nats.start_again()
        await eventually(lambda: messenger.is_connected and listener.is_connected)
        await messenger.publish("news", str(round_).encode())
        assert await queue.depth() == 1
    await eventually(lambda: heard == [b"0", b"1", b"2"])
    item = await taken(queue)
    assert item.payload == b"kept"
    await item.ack()
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]
    await messenger.close()
    await listener.close()


@pytest.mark.parametrize("end", [Server.kill, Server.stop])
async def test_who_waits_for_work_waits_through_a_restart(
    own_queue: WorkQueue, nats: Server, end: Callable[[Server], None]
) -> None:
    waiting = asyncio.create_task(own_queue.get(20.0))
    await asyncio.sleep(0.2)
    end(nats)
    await lasting(0.5)
    await nats.start_again()

    async def put() -> int:
        try:
            return await own_queue.put(b"work")
        except QueueUnavailable:
            return 0

    await eventually(put)
    item = await waiting
    assert item is not None
    assert item.payload == b"work"
    await item.ack()
    assert await own_queue.depth() == 0


async def test_work_taken_before_a_restart_can_be_acknowledged_after_it(
    own: NatsMessenger, own_queue: WorkQueue, nats: Server
) -> None:
    await own_queue.put(b"work")
    item = await taken(own_queue)
    nats.kill()
    await eventually(lambda: not own.is_connected)
    with pytest.raises(QueueUnavailable):
        await item.ack()
    await nats.start_again()
    await eventually(lambda: own.is_connected)
    await item.ack()
    assert await own_queue.depth() == 0
    assert await own_queue.get(4.0) is None


async def test_a_server_that_comes_back_empty_gets_its_queue_again(
    own: NatsMessenger, own_queue: WorkQueue, nats: Server
) -> None:
    await own_queue.put(b"lost")
    nats.kill()
    nats.wipe()
    await nats.start_again()
    await eventually(lambda: own.is_connected)
    assert await own_queue.get(0.5) is None
    await own_queue.put(b"new")
    assert (await taken(own_queue)).payload == b"new"


async def test_a_queue_that_somebody_deleted_is_made_again(own: NatsMessenger, own_queue: WorkQueue) -> None:
    async with own.call() as client:
        await client.jsm().delete_stream("q")
    await own_queue.put(b"work")
    assert (await taken(own_queue)).payload == b"work"


async def test_work_whose_consumer_is_gone_can_be_acknowledged(
    own: NatsMessenger, own_queue: WorkQueue
) -> None:
    await own_queue.put(b"work")
    item = await taken(own_queue)
    async with own.call() as client:
        await client.jsm().delete_consumer("q", nats_messenger.CONSUMER)
    await item.ack()
    assert await own_queue.depth() == 0


async def test_a_connection_that_the_client_has_given_up_is_made_again_with_its_subscriptions(
    own: NatsMessenger,
) -> None:
    heard: list[bytes] = []
    await own.subscribe("news", lambda subject, payload: heard.append(payload))
    async with own.call() as client:
        given_up = client
    await given_up.close()
    await eventually(lambda: own.is_connected)
    await own.publish("news", b"again")
    await eventually(lambda: heard == [b"again"])


async def test_a_receiver_that_fails_gets_the_next_message_all_the_same(
    own: NatsMessenger, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[int] = []
    await own.subscribe("numbers", lambda subject, payload: heard.append(int(payload)))
    for payload in (b"no number", b"7"):
        await own.publish("numbers", payload)
    await eventually(lambda: heard == [7])
    assert "the receiver of numbers failed" in caplog.text


def test_servers_and_credentials_are_those_of_the_environment() -> None:
    environ = {
        "NATS_SERVER": "nats://one:4222, nats://two:4222",
        "NATS_AUTH_USERNAME": "user",
        "NATS_AUTH_PASSWORD": "secret",
    }
    servers = ["nats://one:4222", "nats://two:4222"]
    assert connect_options(environ) == {"servers": servers, "user": "user", "password": "secret"}
    assert connect_options({}) == {"servers": ["nats://localhost:4222"]}


async def test_a_frozen_nats_is_an_error_in_time_and_afterwards_all_goes_on(
    own: NatsMessenger, own_queue: WorkQueue, nats: Server, caplog: pytest.LogCaptureFixture
) -> None:
    nats.freeze()
    begun_s = now_s()
    with pytest.raises(QueueUnavailable):
        await own.publish("news", b"")
    assert now_s() - begun_s < 3.0
    nats.thaw()

    async def works() -> bool:
        try:
            await own_queue.put(b"work")
        except QueueUnavailable:
            return False
        return True

    await eventually(works)
    assert (await taken(own_queue)).payload == b"work"
    await own.publish("news", b"")
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_subscription_that_has_failed_hears_nothing_from_a_server_that_is_back(
    nats: Server, is_cancelled: bool
) -> None:
    messenger = await NatsMessenger.from_environment(nats.environment)
    heard: list[str] = []
    nats.freeze()
    failing = asyncio.create_task(messenger.subscribe("news", lambda *_: heard.append("failed")))
    if is_cancelled:
        await lasting(0.1)
        failing.cancel()
    with pytest.raises((QueueUnavailable, asyncio.CancelledError)):
        await failing
    nats.thaw()

    async def is_heard_again() -> bool:
        with suppress(QueueUnavailable):
            await messenger.subscribe("news", lambda *_: heard.append("subscribed"))
            await messenger.publish("news", b"")
            await lasting(0.1)
        return "subscribed" in heard

    await eventually(is_heard_again)
    await messenger.close()
    assert "failed" not in heard


async def test_a_server_frozen_for_long_is_connected_to_again(nats: Server) -> None:
    messenger = await NatsMessenger.from_environment(nats.environment)
    nats.freeze()
    await eventually(lambda: not messenger.is_connected, timeout_s=15)
    connections = await asyncio.to_thread(_most_connections, nats, 2.5)
    nats.thaw()
    await eventually(lambda: messenger.is_connected)
    await messenger.publish("news", b"")
    await messenger.close()
    assert connections == 1, "attempts that failed have left connections open"


def _most_connections(nats: Server, during_s: float) -> int:
    """The most connections that this process had to the server at once: an attempt takes a second."""
    port = int(nats.environment["NATS_SERVER"].rpartition(":")[2])
    until_s, most = time.monotonic() + during_s, 0
    while time.monotonic() < until_s:
        open_now = psutil.Process().net_connections("tcp")
        most = max(most, sum(bool(each.raddr) and each.raddr.port == port for each in open_now))
        time.sleep(0.02)
    return most


async def test_an_empty_queue_of_the_original_is_replaced_and_one_in_use_is_adopted(
    own: NatsMessenger,
) -> None:
    async with own.call() as client:
        manager = client.jsm()
        for stream in ("empty", "used"):
            await manager.add_stream(name=stream, subjects=[f"{stream}.*"], max_age=600)
            await manager.add_consumer(stream, durable_name="worker-group", ack_wait=30)
        await client.jetstream().publish("used.queue", b"theirs")
        for stream in ("empty", "used"):
            queue = await own.queue(stream)
            await queue.put(b"ours")
        retention = {
            stream: (await manager.stream_info(stream)).config.retention for stream in ("empty", "used")
        }
        assert retention == {"empty": "workqueue", "used": "limits"}
        assert (await manager.consumer_info("used", "worker-group")).config.ack_wait == 3.0
    assert await queue.depth() == 2
    for payload in (b"theirs", b"ours"):
        item = await taken(queue)
        assert item.payload == payload
        await item.ack()
    assert await queue.depth() == 0


async def test_a_message_that_is_too_large_is_refused_for_good(own_queue: WorkQueue) -> None:
    await own_queue.put(b"x" * (7 * 1024 * 1024))
    with pytest.raises(PermanentError):
        await own_queue.put(b"x" * (9 * 1024 * 1024))


async def test_a_wrong_token_is_refused_for_good_and_soon(nats: Server) -> None:
    begun_s = now_s()
    with pytest.raises(PermanentError, match="Authorization"):
        await NatsMessenger.from_environment({**nats.environment, "NATS_AUTH_TOKEN": "guess"})
    assert now_s() - begun_s < 2.0


async def test_no_server_at_all_is_an_error_in_time() -> None:
    with pytest.raises(QueueUnavailable, match="cannot be connected to"):
        await NatsMessenger.from_environment({"NATS_SERVER": "nats://127.0.0.1:9"})


async def test_a_name_that_is_no_stream_name_becomes_one(own: NatsMessenger) -> None:
    queue = await own.queue("a/b.c\\d e_queue")
    await queue.put(b"work")
    assert await queue.depth() == 1


# Lanes


async def test_work_in_a_lane_is_given_to_its_taker_alone(connect: Connect, queue: WorkQueue) -> None:
    stream = f"lanes_{abs(hash(connect))}"
    shared = await (await connect()).queue(stream)
    own = await (await connect()).queue(stream, "worker/1")
    other = await (await connect()).queue(stream, "worker/2")
    await (await (await connect()).queue(stream, "worker/1")).put(b"directed")
    await shared.put(b"for all")

    assert await other.get(0.1) is None
    assert (await taken(shared)).payload == b"for all"
    assert await shared.get(0.1) is None
    assert (await taken(own)).payload == b"directed"


async def test_the_shared_queues_depth_counts_what_is_in_lanes(connect: Connect) -> None:
    stream = f"depth_{abs(hash(connect))}"
    shared = await (await connect()).queue(stream)
    lanes = [await (await connect()).queue(stream, name) for name in ("a", "b")]
    await shared.put(b"1")
    for lane in lanes:
        await lane.put(b"2")
    item = await taken(lanes[0])

    assert [await each.depth() for each in (shared, *lanes)] == [3, 1, 1]
    await item.ack()
    assert [await each.depth() for each in (shared, *lanes)] == [2, 0, 1]


async def test_work_of_a_lane_is_withdrawn_by_its_number_or_altogether(connect: Connect) -> None:
    stream = f"clear_{abs(hash(connect))}"
    shared = await (await connect()).queue(stream)
    lane = await (await connect()).queue(stream, "gone")
    numbers = [await lane.put(payload) for payload in (b"1", b"2", b"3")]
    await shared.put(b"stays")
    await shared.remove(numbers[1])
    await taken(lane)
    assert await lane.depth() == 2
    await lane.clear()

    assert [await shared.depth(), await lane.depth()] == [1, 0]
    assert (await taken(shared)).payload == b"stays"
    await shared.clear()
    assert await shared.depth() == 0


async def test_work_in_a_lane_comes_again_unless_it_is_acknowledged(connect: Connect) -> None:
    stream = f"again_{abs(hash(connect))}"
    lane = await (await connect()).queue(stream, "taker")
    await lane.put(b"work")
    first = await taken(lane)
    second = await taken(lane, 10.0)
    assert (first.deliveries, second.deliveries) == (1, 2)
    await second.ack()
    assert await lane.depth() == 0


async def test_a_stream_from_before_lanes_is_widened_and_keeps_its_work(own: NatsMessenger) -> None:
    async with own.call() as client:
        manager = client.jsm()
        await manager.add_stream(name="old", subjects=["old.queue"], retention="workqueue", max_age=600)
        await manager.add_consumer("old", durable_name="worker-group", ack_wait=3, ack_policy="explicit")
        await client.jetstream().publish("old.queue", b"before")
    lane = await own.queue("old", "taker")
    shared = await own.queue("old")
    await lane.put(b"directed")

    assert await shared.depth() == 2
    assert (await taken(shared)).payload == b"before"
    assert await shared.get(0.1) is None
    assert (await taken(lane)).payload == b"directed"
