"""The order of the end: what is asked of the servers meanwhile holds up no worker, and they wait for it."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from circus.process import DEAD_OR_ZOMBIE, RUNNING

from dynaplan.fleet.shutdown import (
    CLEAN_UP_S,
    Shutdown,
    requests_in_flight,
    show_drain,
    unmanaged_workers,
)
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.store import connections
from dynaplan.store.instances import Instance
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.progress import ProgressLine
from dynaplan.util.prometheus_text import PREFIX, render
from tests.fakes.polling import PATIENCE_S, consistently, eventually

DRAIN_S = 30.0
PLUGIN = "box_fleet"


class Arbiter:
    """As circus' arbiter it has watchers of one process each; a process that is told to end has ended."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        names = {PLUGIN: (), "box_Frontend": ("Frontend",), "box_VllmWorker": ("VllmWorker",)}
        self.watchers = [self._watcher(name, service) for name, service in names.items()]

    def get_watcher(self, name: str) -> Any:
        return next(each for each in self.watchers if each.name == name)

    async def end(self) -> None:
        self.ended.append("servers")

    def _watcher(self, name: str, service: tuple[str, ...]) -> Any:
        process = SimpleNamespace(pid=len(name), status=RUNNING)

        def send_signal(pid: int, number: int) -> None:
            assert (pid, number) == (process.pid, signal.SIGTERM)
            process.status = DEAD_OR_ZOMBIE
            self.ended.append(name)

        async def stop() -> None:
            self.ended.append(name)

        args = [word for each in service for word in ("--service-name", each)]
        return SimpleNamespace(
            name=name, args=args, processes={process.pid: process}, send_signal=send_signal, _stop=stop
        )


@pytest.fixture
def childless() -> Iterator[int]:
    """A process without children: those of the supervisor are killed at the end."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def arbiter() -> Arbiter:
    return Arbiter()


@pytest.fixture
def shutdown(arbiter: Arbiter, childless: int) -> Shutdown:
    services = (ServiceSpec("Frontend", Role.FRONTEND), ServiceSpec("VllmWorker", Role.DECODE))
    graph = GraphSpec("graphs.agg:Frontend", "/srv/project", "box", services)
    surroundings: Any = (arbiter, graph, PLUGIN, None, DRAIN_S, print)
    link: Any = SimpleNamespace(supervisor_pid=childless, look=lambda: None)
    return Shutdown(*surroundings, link=link)


async def test_servers_end_only_when_they_have_answered_and_nothing_else_waits_for_that(
    arbiter: Arbiter, shutdown: Shutdown
) -> None:
    question: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    end = asyncio.create_task(shutdown.run(question))
    await eventually(lambda: arbiter.ended == [PLUGIN, "box_Frontend", "box_VllmWorker"])
    await consistently(lambda: not end.done(), for_s=0.1)
    question.set_result("nobody")
    await end
    assert arbiter.ended[-1] == "servers"


async def test_a_user_in_a_hurry_does_not_wait_for_the_answer(arbiter: Arbiter, shutdown: Shutdown) -> None:
    question: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    shutdown.is_hurried.set()
    await asyncio.wait_for(shutdown.run(question), DRAIN_S)
    assert arbiter.ended[-1] == "servers"
    assert not question.done()


async def test_at_the_deadline_every_worker_is_killed_before_one_is_waited_for(
    arbiter: Arbiter, shutdown: Shutdown
) -> None:
    alive, killed = {len(each.name): 7 for each in arbiter.watchers}, []

    def kill_group(pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        """As the real one kills only a process that started then; its orphans are waited for."""
        alive.pop(pid, None)
        killed.append((pid, started_at, waits_s))
        return (pid,)

    for watcher in arbiter.watchers:
        watcher.send_signal = lambda pid, number: None
    shutdown.processes = cast(Any, SimpleNamespace(identify=alive.get, kill_group=kill_group))
    shutdown.is_hurried.set()
    await shutdown.run()
    workers = [len("box_Frontend"), len("box_VllmWorker")]
    assert killed == [(pid, 7, waits_s) for waits_s in (0.0, CLEAN_UP_S) for pid in workers]
    assert shutdown.killed == ["box_Frontend", "box_VllmWorker"]


@asynccontextmanager
async def process(body: bytes) -> AsyncIterator[str]:
    """The URL of a process that answers every question with that body, as a worker's HTTP server does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for start in range(0, len(body), 100):
            writer.write(body[start : start + 100])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def metrics(requests: float) -> bytes:
    labels = {"dynamo_namespace": "ns", "worker": "ns_Frontend"}
    return render({"before": 1.0, f"{PREFIX}inflight_requests": requests, "after": 2.0}, labels).encode()


async def test_the_requests_of_all_that_answer_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynaplan.fleet.shutdown.IN_FLIGHT_POLL_S", PATIENCE_S)
    async with process(metrics(3)) as one, process(metrics(2)) as two, process(b"nonsense") as three:
        assert await requests_in_flight([one, two, three, "http://127.0.0.1:1", "http://["]) == 5
    assert await requests_in_flight([]) == 0


async def test_they_are_shown_with_the_time_that_is_left_until_none_is() -> None:
    shown = io.StringIO()
    async with process(metrics(3)) as url:
        task = asyncio.create_task(show_drain([url], 30.0, ProgressLine(shown, every_s=0.0)))
        await eventually(lambda: shown.getvalue())
        task.cancel()
        await asyncio.wait({task})
    assert re.match(r"3 requests in flight, at most 00:(30|[012]\d) left\n", shown.getvalue())


ALONE = Instance(
    *("box", "VllmWorker", "generate", 7, "http://127.0.0.1:1"),
    worker="box_VllmWorker_gpu1_77",
    pid=77,
    is_managed=False,
)
OWN = Instance("box", "VllmWorker", "generate", 8, "http://127.0.0.1:2", worker="box_VllmWorker", pid=78)


async def test_unmanaged_workers_are_named_and_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    monkeypatch.setattr(store, "close", lambda: asyncio.sleep(0))
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    await store.put(OWN.key, OWN.to_json())
    await store.put("/services/box/x/y/1", "no registration")
    assert await unmanaged_workers("box") == ""
    await store.put(ALONE.key, ALONE.to_json())
    assert await unmanaged_workers("box") == (
        "Left running, because serve has not started them: box_VllmWorker_gpu1_77 (pid 77)."
    )
    assert await unmanaged_workers("other") == ""


async def test_a_store_that_is_away_has_nothing_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(SystemClock())
    await store.close()
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    assert await unmanaged_workers("box") == ""
