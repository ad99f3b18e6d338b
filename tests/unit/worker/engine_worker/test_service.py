from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from dynaplan.engines import registry
from dynaplan.engines.port import EngineContext
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.store.discovery import Discovery
from dynaplan.store.instances import Instance
from dynaplan.util.errors import ConfigError, PermanentError
from dynaplan.util.http_routes import Route
from dynaplan.worker.engine_worker.service import start_decode_worker, start_prefill_worker
from dynaplan.worker.process import WorkerRuntime
from tests.fakes.clock import LoopClock
from tests.fakes.plain_engine import PlainEngine
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Engine(PlainEngine):
    """An engine that does nothing but say what it is asked to do."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.broken = asyncio.Event()

    async def start(self) -> None:
        self.events.append("start")

    async def stop(self) -> None:
        self.events.append("stop")

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

    async def stop(self) -> None:
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


@pytest.fixture
async def runtime() -> AsyncIterator[WorkerRuntime]:
    store = FakeStore()

    async def away() -> Any:
        raise PermanentError("no messenger in this test")

    made = WorkerRuntime(
        namespace="ns",
        component="VllmWorker",
        worker_name="ns_VllmWorker",
        worker_token="token",
        url="http://127.0.0.1:1",
        store=store,
        leases=store,
        clock=LoopClock(),
        discovery=Discovery(store, "ns"),
        connect_messenger=away,
    )
    yield made
    await made.close()


async def test_an_engine_becomes_the_workers_routes_load_and_card(
    runtime: WorkerRuntime, engine: Engine
) -> None:
    await start_decode_worker(runtime)
    assert engine.events == ["start"]
    assert [route.path for route in runtime.routes] == ["/v1/completions"]
    assert runtime.load.running_requests == 7
    assert runtime.card == {"model": "m", "tensor_parallel": 1}
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


async def test_an_engine_whose_start_fails_or_is_interrupted_is_stopped_too(
    runtime: WorkerRuntime, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start() -> None:
        raise PermanentError("no memory")

    monkeypatch.setattr(engine, "start", start)
    with pytest.raises(PermanentError):
        await start_decode_worker(runtime)
    assert runtime.closers == [engine.stop]


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
    assert runtime.closers == [engine.stop]
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
    assert "/v1/{path:.*}" in [route.path for route in runtime.routes]
    assert runtime.card.get("kv_network", False) is is_able
    assert runtime.finishers == []


class TellingEngine(Engine):
    """One that tells its blocks, of 16 tokens."""

    def subscribe_blocks(self, changed: Any) -> bool:
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
