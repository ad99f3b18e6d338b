"""KV events from the engine to a frontend's index, over real sockets and a real NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import zmq

from dynaplan.engines.kv_events import BlockChange, CachedBlocks, Cleared
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server import block_events
from dynaplan.engines.server.block_events import BlockEvents, publisher_config
from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.engines.timing_model.tokens import tokenize
from dynaplan.events import event_connections
from dynaplan.events.engine_batches import END_OF_REPLAY
from dynaplan.gateway.kv_routing.follower import KvCacheFollower
from dynaplan.store.discovery import Discovery
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, PermanentError
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.engine_worker import start_decode_worker
from dynaplan.worker.lifecycle import HostedService, WorkerLifecycle
from dynaplan.worker.server import WorkerServer
from dynaplan.worker.worker_runtime import WorkerRuntime
from tests.fakes.kv_recordings import recorded
from tests.fakes.polling import eventually
from tests.fakes.servers import Server

TOKEN = "token-of-this-test"
FIRST, SECOND = "once upon a time there was a router " * 20, "the sky is blue and the sea is deep " * 20


class Deployment:
    """Workers with simulated engines, and frontends' followers, in this process; sockets are real."""

    def __init__(self, environment: Mapping[str, str], stack: AsyncExitStack) -> None:
        self.environment = environment
        self.stack = stack
        self.store = MemoryStore(SystemClock())
        self.lives: dict[str, asyncio.Task[Any]] = {}

    async def runtime(self, name: str, url: str, **settings: Any) -> WorkerRuntime:
        discovery = Discovery(self.store, "ns")
        await discovery.start()
        self.stack.push_async_callback(discovery.close)

        async def no_messenger() -> Any:
            raise PermanentError("no messenger in this test")

        return WorkerRuntime(
            namespace="ns",
            component=name.split("_")[0],
            worker_name=name,
            worker_token=TOKEN,
            url=url,
            store=self.store,
            clock=SystemClock(),
            discovery=discovery,
            settings=settings,
            connect_messenger=no_messenger,
            connect_events=partial(event_connections.connect_events, self.environment),
        )

    async def worker(self, name: str, **settings: Any) -> WorkerRuntime:
        """A decode worker that serves and is registered."""
        server = WorkerServer(bound_socket("127.0.0.1", 0), TOKEN)
        options = {"router": "kv", "speedup-ratio": 0, **settings}
        runtime = await self.runtime(name, server.url, **options)

        async def prepare() -> HostedService:
            await start_decode_worker(runtime)
            return HostedService(registered=["generate"])

        def no_public() -> WorkerServer:
            raise AssertionError("this worker has no public endpoints")

        lifecycle = WorkerLifecycle(runtime, server, no_public, 5.0, has_signals=False)
        self.lives[name] = task = asyncio.create_task(lifecycle.run(prepare))

        async def end() -> None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await runtime.close()

        self.stack.push_async_callback(end)
        await runtime.ready.wait()
        return runtime

    async def follower(self) -> KvCacheFollower:
        """The index of one more frontend."""
        runtime = await self.runtime("Frontend", "http://127.0.0.1:1")
        self.stack.push_async_callback(runtime.close)
        follower = KvCacheFollower.from_runtime(runtime)
        self.stack.push_async_callback(follower.close)
        follower.start()
        return follower

    async def ask(self, worker: WorkerRuntime, prompt: str) -> None:
        body = {"prompt": prompt, "max_tokens": 4}
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{worker.url}/v1/completions", json=body) as response,
        ):
            assert response.status == 200


def hashes(prompt: str) -> list[int]:
    return block_hashes(tokenize(prompt), 16)


async def until_known(follower: KvCacheFollower, worker: WorkerRuntime, prompt: str) -> None:
    """Wait until the worker is known to hold the whole prompt."""
    wanted = len(hashes(prompt))
    await eventually(
        lambda: (
            follower.is_current(worker.instance_id)
            and follower.overlaps(hashes(prompt)).get(worker.instance_id) == wanted
        )
    )


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


@pytest.fixture
def here(nats: Server, stack: AsyncExitStack) -> Deployment:
    return Deployment(nats.environment, stack)


async def test_what_engines_compute_is_in_every_frontends_index_and_leaves_it_with_them(
    here: Deployment,
) -> None:
    follower = await here.follower()
    one, other = await here.worker("VllmWorker_1"), await here.worker("VllmWorker_2")
    assert one.card["kv_events"] == {"block_tokens": 16}
    await here.ask(one, FIRST)
    await here.ask(other, SECOND)
    await until_known(follower, one, FIRST)
    await until_known(follower, other, SECOND)
    assert other.instance_id not in follower.overlaps(hashes(FIRST))
    late = await here.follower()
    await until_known(late, one, FIRST)
    one.leave("the test says so")
    await here.lives["VllmWorker_1"]
    for each in (follower, late):
        await eventually(lambda each=each: each.overlaps(hashes(FIRST)) == {})
        assert len(each.overlaps(hashes(SECOND))) == 1


async def test_evicted_blocks_leave_the_index(here: Deployment) -> None:
    follower = await here.follower()
    worker = await here.worker("VllmWorker", **{"num-gpu-blocks-override": 16, "max-model-len": 256})
    await here.ask(worker, FIRST)
    await until_known(follower, worker, FIRST)
    await here.ask(worker, SECOND)
    await until_known(follower, worker, SECOND)
    # 16 blocks hold the second prompt's 12; what is left of the first one's is its beginning.
    await eventually(lambda: follower.overlaps(hashes(FIRST)).get(worker.instance_id, 0) <= 4)


@pytest.mark.parametrize("router", ["round-robin", "kv"])
async def test_a_worker_that_is_not_to_tell_publishes_nothing(here: Deployment, router: str) -> None:
    worker = await here.worker("VllmWorker", router=router, **{"kv-events": False})
    await here.ask(worker, FIRST)
    assert "kv_events" not in worker.card
    assert "dynaplan:kv_block_events_total" not in worker.metrics
    assert "dynamo_component_events_published_total" not in worker.metrics


@pytest.mark.parametrize("is_wiped", [False, True])
async def test_while_nats_is_away_nothing_is_current_and_then_everything_is_again(
    here: Deployment, nats: Server, is_wiped: bool
) -> None:
    follower = await here.follower()
    worker = await here.worker("VllmWorker")
    await here.ask(worker, FIRST)
    await until_known(follower, worker, FIRST)
    nats.kill()
    await eventually(lambda: not follower.is_current(worker.instance_id))
    assert follower.overlaps(hashes(FIRST))
    await here.ask(worker, SECOND)
    if is_wiped:
        nats.wipe()
    await nats.start_again()
    await until_known(follower, worker, SECOND)


# An engine with a process of its own


class FakeEngine:
    """Publishes as vLLM's ZmqEventPublisher does (vllm/distributed/kv_events.py, 0.32).

    It binds a PUB and a ROUTER socket, keeps the last messages, and sends the ones from a number on again to
    whoever asks, then -1 as 64 bits. Older ones, and SGLang's, leave the topic out there (``has_topic``).
    """

    def __init__(self, config: dict[str, Any], kept: int = 10_000, has_topic: bool = True) -> None:
        self._topic = [b""] if has_topic else []
        self._context: zmq.Context[Any] = zmq.Context()
        self._events = self._context.socket(zmq.PUB)
        self._events.bind(config["endpoint"])
        self._again = self._context.socket(zmq.ROUTER)
        self._again.bind(config["replay_endpoint"])
        self._kept = kept
        self._buffer: list[list[bytes]] = []
        self._serving = asyncio.create_task(self._serve())

    def publish(self, frames: list[bytes], *, is_lost: bool = False) -> None:
        self._buffer = [*self._buffer, frames][-self._kept :]
        if not is_lost:
            self._events.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            while self._again.poll(0):
                identity, _, start = self._again.recv_multipart()
                for _, sequence, payload in self._buffer:
                    if sequence >= start:
                        self._again.send_multipart([identity, b"", *self._topic, sequence, payload])
                self._again.send_multipart([identity, b"", *self._topic, END_OF_REPLAY, b""])
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)


class Follower:
    """The worker's side: what it has been told."""

    def __init__(self, context: EngineContext) -> None:
        self.cache = CachedBlocks()
        self.changes: list[BlockChange] = []
        self.events = BlockEvents(context, self.changed)

    def changed(self, changes: Any) -> None:
        self.changes += changes
        self.cache.events(7, changes)

    @property
    def messages(self) -> float:
        return self.events.metrics()["dynaplan:kv_engine_messages_total"]

    @property
    def lost(self) -> float:
        return self.events.metrics()["dynaplan:kv_engine_messages_lost_total"]

    async def has(self, count: int) -> None:
        await eventually(lambda: self.messages + self.lost == count)


Make = Callable[..., Awaitable[tuple[FakeEngine, Follower]]]


@pytest.fixture
async def engine(runtime_dir: Path, stack: AsyncExitStack) -> Make:
    async def make(before: int = 0, **options: Any) -> tuple[FakeEngine, Follower]:
        context = EngineContext("ns_VllmWorker", scratch_dir=str(runtime_dir))
        engine = FakeEngine(publisher_config(context), **options)
        stack.push_async_callback(engine.close)
        for frames in recorded()[:before]:
            engine.publish(frames)
        follower = Follower(context)
        follower.events.start()
        stack.callback(follower.events.close)
        return engine, follower

    return make


async def heard(published: FakeEngine, follower: Follower, number: int) -> None:
    """Publish a message until it is heard: what is published before a subscriber is connected nobody gets."""

    def is_heard() -> bool:
        published._events.send_multipart(recorded()[number])
        return follower.events._next > number or number in follower.events._waiting

    await eventually(is_heard)


def expected() -> CachedBlocks:
    """What the whole recording leaves, message by message."""
    from dynaplan.engines.server.block_events import BlockTranslator
    from dynaplan.events.engine_batches import read_engine_events

    translation, cache = BlockTranslator(), CachedBlocks()
    for frames in recorded():
        cache.events(7, translation.changes(read_engine_events(frames[2])))
    return cache


@pytest.mark.parametrize("has_topic", [True, False])
async def test_a_worker_that_connects_late_is_told_what_was_published_before(
    engine: Make, has_topic: bool
) -> None:
    published, follower = await engine(before=300, has_topic=has_topic)
    await follower.has(300)
    for frames in recorded()[300:]:
        published.publish(frames)
    await follower.has(400)
    assert set(follower.cache.snapshot(7).hashes) == set(expected().snapshot(7).hashes)
    assert follower.lost == 0


async def test_messages_that_were_missed_are_asked_for(engine: Make) -> None:
    published, follower = await engine()
    for number, frames in enumerate(recorded()):
        published.publish(frames, is_lost=number % 50 < 20)
    await follower.has(400)
    assert set(follower.cache.snapshot(7).hashes) == set(expected().snapshot(7).hashes)
    assert follower.lost == 0


async def test_when_messages_cannot_be_had_again_no_block_is_said_to_be_cached_that_may_not_be(
    engine: Make,
) -> None:
    published, follower = await engine(kept=10)
    for number, frames in enumerate(recorded()):
        published.publish(frames, is_lost=200 <= number < 300)
    await follower.has(400)
    assert follower.lost >= 90
    assert Cleared() in follower.changes
    assert set(follower.cache.snapshot(7).hashes) <= set(expected().snapshot(7).hashes)


async def test_what_was_heard_before_a_replay_that_begins_later_is_applied_in_its_order(
    engine: Make,
) -> None:
    published, follower = await engine(kept=10)
    published._serving.cancel()
    for frames in recorded()[:102]:
        published.publish(frames, is_lost=True)
    await heard(published, follower, 101)
    for frames in recorded()[102:200]:
        published.publish(frames)
    await eventually(lambda: len(follower.events._waiting) == 99)
    published._serving = asyncio.create_task(published._serve())
    await follower.has(200)
    for frames in recorded()[200:]:
        published.publish(frames)
    await follower.has(400)
    assert follower.lost == 101
    assert set(follower.cache.snapshot(7).hashes) <= set(expected().snapshot(7).hashes)


async def test_an_engine_that_sends_nothing_again_is_followed_from_where_it_is_heard(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_events, "REPLAY_TIMEOUT_S", 0.1)
    published, follower = await engine(before=30)
    published._serving.cancel()
    await heard(published, follower, 30)
    for frames in recorded()[31:]:
        published.publish(frames)
    await follower.has(400)
    assert set(follower.cache.snapshot(7).hashes) <= set(expected().snapshot(7).hashes)


async def test_garbage_is_counted_and_the_rest_is_read(engine: Make) -> None:
    published, follower = await engine()
    await eventually(lambda: not follower.events._is_replaying)
    published._events.send_multipart([b"", b"x", b"y"])
    published._events.send_multipart([b"", bytes(8), b"\xc1"])
    published.publish(recorded()[1])
    await eventually(lambda: follower.messages == 2)
    assert follower.events.metrics()["dynaplan:kv_engine_messages_unreadable_total"] == 2


def test_a_start_that_failed_half_way_is_closed_without_waiting(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = Follower(EngineContext("ns_VllmWorker", scratch_dir=str(runtime_dir))).events
    monkeypatch.setattr(events, "_replay", "nonsense://")
    with pytest.raises(zmq.ZMQError):
        try:
            events.start()
        finally:  # the error's traceback still has the sockets
            events.close()


def test_a_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="is not private"):
        publisher_config(EngineContext("ns_VllmWorker", scratch_dir=str(tmp_path)))
