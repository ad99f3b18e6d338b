"""The order of the end: what is asked of the servers meanwhile holds up no worker, and they wait for it."""

from __future__ import annotations

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from circus.process import DEAD_OR_ZOMBIE, RUNNING

from dynaplan.fleet.shutdown import Shutdown
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from tests.fakes.polling import consistently, eventually

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
    """A process without children: those of the holder are killed at the end."""
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
    link: Any = SimpleNamespace(holder_pid=childless, look=lambda: None)
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
