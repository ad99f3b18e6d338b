"""The worker's own server in front of its engine's.

A worker says that its engine sleeps, under its lease, and wakes it when it is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynaplan.engines import registry
from dynaplan.engines.port import EngineContext
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers, request_wake
from dynaplan.http.routes import Route
from dynaplan.store.instances import ASLEEP, SLEEP, SLEEP_FAILED, WAKE, Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, PermanentError
from dynaplan.util.sockets import bound_socket, free_port
from dynaplan.util.tasks import BackgroundTasks
from dynaplan.worker.engine_worker import Relay, SleepReporter, start_decode_worker, start_prefill_worker
from dynaplan.worker.server import WorkerServer
from dynaplan.worker.worker_runtime import LEASE_REVOKED, WorkerRuntime
from tests.fakes.plain_engine import PlainEngine
from tests.fakes.polling import eventually
from tests.fakes.worker_runtime import worker_runtime

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Engine(PlainEngine):
    """An engine that does nothing but say what it is asked to do."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.broken = asyncio.Event()

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self, *, keeps_cache: bool = False) -> None:
        self.events.append("stop, cache kept" if keeps_cache else "stop")

    async def wait_for_failure(self) -> None:
        await self.broken.wait()
        raise PermanentError("the engine died")

    def routes(self) -> Sequence[Route]:
        return (Route("POST", "/v1/completions", self._serve),)

    def load(self) -> WorkerLoad:
        return WorkerLoad(running_requests=7)

    async def _serve(self, _: Any) -> None: ...


class ServingEngine(Engine):
    """One with an HTTP port of its own."""

    url = "http://127.0.0.1:2"


class PatientEngine(Engine):
    """One that holds a hand-off and does not end before somebody has taken it."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = asyncio.Event()

    async def stop(self, *, keeps_cache: bool = False) -> None:
        await self.taken.wait()
        await super().stop()

    def release_all(self) -> None:
        self.events.append("abandon")
        self.taken.set()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine()
    monkeypatch.setattr(registry, "make_engine", lambda *_, **__: made)
    return made


async def away() -> Any:
    raise PermanentError("no messenger in this test")


@pytest.fixture
async def runtime() -> AsyncIterator[WorkerRuntime]:
    made = worker_runtime(connect_messenger=away)
    yield made
    await made.close()


async def test_an_engine_becomes_the_workers_routes_load_and_card(
    runtime: WorkerRuntime, engine: Engine
) -> None:
    await start_decode_worker(runtime)
    assert engine.events == ["start"]
    assert [route.path for route in runtime.routes] == ["/v1/completions"]
    assert runtime.load.running_requests == 7
    assert runtime.card == {"model": "m", "tensor_parallel": 1, "request_slots": 0}
    assert runtime.engine_url == ""
    assert runtime.finishers == []


async def test_an_engine_with_a_port_of_its_own_is_told_of_and_asked_before_it_is_stopped(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[EngineContext] = []

    def make(_name: str, _options: Any, context: EngineContext) -> Engine:
        contexts.append(context)
        return ServingEngine()

    monkeypatch.setattr(registry, "make_engine", make)
    runtime.gpus, runtime.scratch_dir = 2, "/dev/shm/x"
    await start_decode_worker(runtime)
    assert contexts == [EngineContext("ns_VllmWorker", "decode", runtime.url, "token", 2, "/dev/shm/x")]
    assert runtime.engine_url == "http://127.0.0.1:2"
    assert runtime.card["tensor_parallel"] == 2
    assert runtime.held == 7
    assert len(runtime.finishers) == 1


@pytest.mark.parametrize("engine_type", [Engine, ServingEngine])
async def test_the_worker_of_a_model_on_request_leaves_when_its_routers_say_that_nothing_comes(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch, engine_type: type[Engine]
) -> None:
    monkeypatch.setattr(registry, "make_engine", lambda *_, **__: engine_type())
    runtime.is_on_request = True
    await start_decode_worker(runtime)
    assert len(runtime.finishers) == 1
    assert not runtime.lingers


async def test_an_engine_whose_start_fails_or_is_interrupted_is_stopped_too(
    runtime: WorkerRuntime, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> None:
        raise PermanentError("no memory")

    monkeypatch.setattr(engine, "start", start)
    with pytest.raises(PermanentError):
        await start_decode_worker(runtime)
    await runtime.closers[0]()
    assert engine.events[-1] == "stop"


async def test_a_worker_ends_when_its_engine_dies(runtime: WorkerRuntime, engine: Engine) -> None:
    await start_decode_worker(runtime)
    await asyncio.sleep(1)
    assert not runtime.failed.done()
    engine.broken.set()
    await asyncio.sleep(1)
    assert str(runtime.failed.result()) == "the engine died"


async def test_a_decode_engine_stops_last_and_a_prefill_engine_before_its_worker_is_drained(
    runtime: WorkerRuntime, engine: Engine
) -> None:
    await start_decode_worker(runtime)
    assert (len(runtime.closers), len(runtime.finishers)) == (1, 0)
    await start_prefill_worker(runtime)
    (finish,) = runtime.finishers
    await finish()
    assert engine.events == ["start", "start", "stop"]


async def test_nothing_is_pulled_before_the_worker_is_ready(runtime: WorkerRuntime, engine: Engine) -> None:
    await start_prefill_worker(runtime)
    await asyncio.sleep(5)
    assert not runtime.failed.done()
    runtime.ready.set()
    await asyncio.sleep(1)
    assert str(runtime.failed.result()) == "no messenger in this test"


@pytest.mark.parametrize("value", [0, -1, "many", True, 1.5])
async def test_a_wrong_number_of_prefills_is_an_error(
    runtime: WorkerRuntime, engine: Engine, value: object
) -> None:
    runtime.settings = {"max-concurrent-prefills": value}
    with pytest.raises(ConfigError, match="max-concurrent-prefills"):
        await start_prefill_worker(runtime)


async def test_a_prefill_worker_does_not_wait_for_hand_offs_that_nobody_is_left_to_take(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PatientEngine()
    monkeypatch.setattr(registry, "make_engine", lambda *_, **__: engine)
    await runtime.discovery.start()
    frontend = Instance("ns", "Frontend", "health", 7, "http://127.0.0.1:3", card={"routes_to": "VllmWorker"})
    await runtime.store.put(frontend.key, frontend.to_json())
    await start_prefill_worker(runtime)
    finishing = asyncio.create_task(runtime.finishers[0]())
    await asyncio.sleep(20)
    assert engine.events == ["start"]

    await runtime.store.delete(frontend.key)
    await asyncio.wait_for(finishing, 10)

    assert engine.events == ["start", "abandon", "stop"]
    await runtime.discovery.close()


@pytest.mark.parametrize(("engine", "is_able"), [("vllm", True), ("sim", False)])
async def test_on_a_worker_that_other_hosts_reach_its_own_server_takes_the_engines_requests(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch, engine: str, is_able: bool
) -> None:
    monkeypatch.setattr(registry, "make_engine", lambda *_: ServingEngine())
    runtime.url, runtime.settings = "http://10.0.0.2:1", {"kv-network": True, "engine": engine}
    await start_decode_worker(runtime)
    assert runtime.engine_url == ""
    assert "/v1/*" in [route.path for route in runtime.routes]
    assert runtime.card.get("kv_network", False) is is_able
    assert runtime.finishers == []


class TellingEngine(Engine):
    """One that tells its blocks, of 16 tokens."""

    def subscribe_kv_events(self, changed: Any) -> bool:
        self.events.append("tell")
        return True

    def card(self) -> dict[str, Any]:
        return {"model": "m", "kv_block_tokens": 16}


@pytest.mark.parametrize("by", ["the configuration", "a frontend that is there", "nobody"])
async def test_an_engine_tells_its_blocks_before_it_starts_where_frontends_route_by_them(
    runtime: WorkerRuntime, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    engine = TellingEngine()
    monkeypatch.setattr(registry, "make_engine", lambda *_, **__: engine)
    if by == "the configuration":
        runtime.settings = {"router": "kv"}
    if by == "a frontend that is there":
        frontend = Instance(
            "ns", "Frontend", "health", 5, "http://127.0.0.1:3", card={"follows_kv_events": True}
        )
        monkeypatch.setattr(runtime.discovery, "all", lambda: (frontend,))
    await start_decode_worker(runtime)
    if by == "nobody":
        assert engine.events == ["start"]
        assert "kv_events" not in runtime.card
    else:
        assert engine.events == ["tell", "start"]
        assert runtime.card["kv_events"] == {"block_tokens": 16}
        assert "/kv_blocks" in [route.path for route in runtime.routes]


SEEN: list[web.Request] = []


async def streams(request: web.Request) -> web.StreamResponse:
    """Answer in two pieces, as an engine streams; break off after the first when told to."""
    SEEN.append(request)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    if request.query.get("break"):
        assert request.transport
        request.transport.abort()
        return response
    await response.write(await request.read())
    return response


async def refuses(request: web.Request) -> web.Response:
    return web.json_response({"error": "no"}, status=400)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of a worker whose engine is behind it."""
    app = web.Application()
    app.router.add_post("/v1/completions", streams)
    app.router.add_post("/v1/chat/completions", refuses)
    engine = TestServer(app)
    await engine.start_server()
    async for served in relayed(str(engine.make_url("")).rstrip("/")):
        yield served
    await engine.close()


async def relayed(engine_url: str) -> AsyncIterator[str]:
    relay = Relay(engine_url, "token")
    worker = WorkerServer(bound_socket("127.0.0.1", 0), "token")
    await worker.start(relay.routes())
    yield worker.url
    await worker.stop()
    await relay.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer token"}) as made:
        yield made


async def test_an_answer_comes_through_with_status_type_and_every_byte(
    url: str, client: aiohttp.ClientSession
) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": "r1", "X-Other": "no"}
    async with client.post(f"{url}/v1/completions?n=2", data=b'{"a": 1}', headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert await answer.read() == b'data: 1\n\n{"a": 1}'
    seen = SEEN[-1]
    assert (seen.headers["X-Request-Id"], seen.headers["Authorization"]) == ("r1", "Bearer token")
    assert seen.query_string == "n=2"
    assert "X-Other" not in seen.headers
    async with client.post(f"{url}/v1/chat/completions", data=b"{}") as answer:
        assert (answer.status, await answer.json()) == (400, {"error": "no"})


async def test_without_the_token_nothing_is_sent_on(url: str) -> None:
    before = len(SEEN)
    async with aiohttp.ClientSession() as stranger, stranger.post(f"{url}/v1/completions") as answer:
        assert answer.status == 401
    assert len(SEEN) == before


async def test_an_answer_that_breaks_off_does_not_look_whole(url: str, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{url}/v1/completions?break=1", data=b"x") as answer:
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_an_engine_that_cannot_be_reached_has_not_begun(client: aiohttp.ClientSession) -> None:
    async for url in relayed(f"http://127.0.0.1:{free_port()}"):
        async with client.post(f"{url}/v1/completions", data=b"x") as answer:
            assert answer.status == 503


class SleepyEngine(PlainEngine):
    def __init__(self) -> None:
        self.is_asleep = False
        self.reason = ""
        self.requests = 0
        self.levels: list[str] = []

    def load(self) -> WorkerLoad:
        return WorkerLoad(is_asleep=self.is_asleep)

    async def count_requests(self) -> int:
        return self.requests

    async def sleep(self, level: str) -> str:
        self.levels.append(level)
        self.is_asleep = not self.reason
        return self.reason

    async def wake(self) -> str:
        self.is_asleep = bool(self.reason)
        return self.reason


class WorkerEnvironment:
    """What a worker's runtime gives."""

    def __init__(self) -> None:
        self.namespace = "ns"
        self.clock = SystemClock()
        self.store = MemoryStore(self.clock)
        self.instance_id = 0
        self.held = 0
        self.settings = {"enable-sleep-mode": True}
        self.component = "VllmWorker"
        self.worker_token = "token"
        self.client_tls = True
        self.discovery = SimpleNamespace(all=lambda: ())


@asynccontextmanager
async def noticed(engine: SleepyEngine) -> AsyncIterator[WorkerEnvironment]:
    runtime = WorkerEnvironment()
    runtime.instance_id = await runtime.store.grant(10)
    notice = asyncio.create_task(SleepReporter(cast(Any, runtime), cast(Any, engine)).run())
    try:
        yield runtime
    finally:
        notice.cancel()
        await asyncio.gather(notice, return_exceptions=True)


async def told(store: MemoryStore) -> dict[str, str]:
    return {item.key: item.value for item in await store.list("v1/ns/")}


async def holds(store: MemoryStore, wanted: dict[str, str]) -> None:
    async with asyncio.timeout(10):
        while await told(store) != wanted:
            await asyncio.sleep(0.01)


async def test_it_says_that_it_sleeps_and_wakes_when_it_is_asked() -> None:
    engine = SleepyEngine()
    async with noticed(engine) as runtime:
        key = ASLEEP.key("ns", runtime.instance_id)
        engine.is_asleep = True
        await holds(runtime.store, {key: ""})
        engine.reason = "it does not want to"
        assert await request_wake(runtime.store, "ns", runtime.instance_id)
        await holds(runtime.store, {key: "it does not want to"})
        engine.reason = ""
        await runtime.store.put(WAKE.key("ns", runtime.instance_id), "")
        await holds(runtime.store, {})
        assert not engine.is_asleep


async def test_under_a_new_lease_it_says_that_again() -> None:
    engine = SleepyEngine()
    engine.is_asleep = True
    async with noticed(engine) as runtime:
        await holds(runtime.store, {ASLEEP.key("ns", runtime.instance_id): ""})
        before, runtime.instance_id = runtime.instance_id, await runtime.store.grant(10)
        await holds(runtime.store, {ASLEEP.key("ns", runtime.instance_id): ""})
        assert ASLEEP.key("ns", before) not in await told(runtime.store)


async def test_one_sleeper_is_woken_for_all_and_one_that_can_be_first() -> None:
    store, background, now = MemoryStore(SystemClock()), BackgroundTasks(), [0.0]
    sleeping = SleepingWorkers(store, "ns", background, lambda: now[0])
    instances = [Instance("ns", "VllmWorker", "generate", number, "") for number in (1, 2, 3)]
    sleeping.follow({ASLEEP.key("ns", 1): "in vain", ASLEEP.key("ns", 2): "", "v1/ns/asleep/?": ""})
    assert [each in sleeping for each in instances] == [True, True, False]
    assert [sleeping.wake_one(instances[:2]) for _ in range(3)] == [""] * 3
    await eventually(lambda: not len(background))
    assert await told(store) == {WAKE.key("ns", 2): ""}
    await store.delete(WAKE.key("ns", 2))
    assert sleeping.wake_one(instances[:1]) == "in vain"
    now[0] = 6.0
    sleeping.wake_one(instances[:2])
    await eventually(lambda: not len(background))
    assert set(await told(store)) == {WAKE.key("ns", 1), WAKE.key("ns", 2)}


@pytest.mark.parametrize(("why", "stop"), [(LEASE_REVOKED, "stop, cache kept"), ("SIGTERM arrived", "stop")])
async def test_an_engine_keeps_its_cache_only_when_its_worker_is_put_away(
    runtime: WorkerRuntime, engine: Engine, why: str, stop: str
) -> None:
    await start_decode_worker(runtime)
    runtime.leave(why)
    for close in runtime.closers:
        await close()
    assert stop in engine.events


async def test_an_engine_is_put_to_sleep_when_it_has_answered_all() -> None:
    engine = SleepyEngine()
    engine.requests = 1
    async with noticed(engine) as runtime:
        order = SLEEP.key("ns", runtime.instance_id)
        await runtime.store.put(order, "1")
        for _ in range(5):
            await asyncio.sleep(1)
            assert engine.levels == []
        engine.requests = 0
        await holds(runtime.store, {order: "1", ASLEEP.key("ns", runtime.instance_id): ""})
        assert engine.levels == ["1"]


async def test_an_engine_that_cannot_sleep_says_why_and_is_asked_once() -> None:
    engine = SleepyEngine()
    engine.reason = "no room"
    async with noticed(engine) as runtime:
        order = SLEEP.key("ns", runtime.instance_id)
        await runtime.store.put(order, "1")
        await holds(runtime.store, {order: f"{SLEEP_FAILED}no room"})
        assert engine.levels == ["1"]


async def test_an_instance_that_is_to_sleep_gets_nothing_and_is_not_woken() -> None:
    store = MemoryStore(SystemClock())
    sleeping = SleepingWorkers(store, "ns", BackgroundTasks(), lambda: 0.0)
    instance = Instance("ns", "VllmWorker", "generate", 1, "")
    changes: list[frozenset[int]] = []
    sleeping.on_change(changes.append)
    sleeping.follow_orders({SLEEP.key("ns", 1): "1"})
    assert instance in sleeping
    assert not sleeping.all_asleep([instance])
    sleeping.follow_orders({})
    assert instance not in sleeping
    assert changes == [frozenset(), frozenset()]
