"""A held process as circus sees it. That it is started, adopted and ended is shown in tests/e2e."""

from __future__ import annotations

import errno
import os
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from circus.process import Process

from dynaplan.fleet.reattach.processes import (
    REMEMBERED_ENDS,
    RetryingWatcher,
    SupervisedFleet,
    SupervisedProcess,
)


def test_a_process_has_not_begun_in_the_future_though_the_clock_was_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun_s = psutil.Process().create_time()
    monkeypatch.setattr(time, "time", lambda: begun_s - 30)
    process = SupervisedProcess.__new__(SupervisedProcess)
    process.name = "ns_VllmWorker"
    fleet = SimpleNamespace(adoptable={"ns_VllmWorker": os.getpid()}, processes={})
    process.watcher = SimpleNamespace(supervised_fleet=fleet)
    process.spawn()
    assert process.started == begun_s - 30
    assert fleet.processes == {os.getpid(): process}


def fleet_that_adopts(**pids: int) -> tuple[SupervisedFleet, SimpleNamespace]:
    """A fleet that was told what its supervisor has, and the link."""
    link = SimpleNamespace(started=[], on_end=None)
    link.spawn = lambda name, *about: link.started.append(name) or os.getpid()
    return SupervisedFleet(cast(Any, link), pids, (), {}), link


def held_process(fleet: SupervisedFleet, name: str, *args: str) -> SupervisedProcess:
    process = SupervisedProcess.__new__(SupervisedProcess)
    process.name, process.working_dir, process.env = name, "/", {}
    process.watcher = SimpleNamespace(supervised_fleet=fleet, args=args, ends_with_serve=False)
    for method, answer in (("format_args", ["x"]), ("_get_stdin_socket_fd", None)):
        setattr(process, method, lambda answer=answer: answer)
    return process


def test_a_worker_that_ended_before_it_was_adopted_is_left_to_the_fleet_plugin() -> None:
    fleet, link = fleet_that_adopts(ns_VllmWorker=1 << 30)
    link.on_end(1 << 30, 9)
    late = held_process(fleet, "ns_VllmWorker", "-m", "x", "--service-name", "VllmWorker")
    with pytest.raises(ProcessLookupError, match="before it was adopted"):  # circus then has no process
        late.spawn()
    assert link.started == []
    late.spawn()
    assert link.started == ["ns_VllmWorker"]


def test_the_exit_codes_of_the_last_ends_are_kept_also_of_those_before_it() -> None:
    link = SimpleNamespace(on_end=None)
    fleet = SupervisedFleet(cast(Any, link), {"ns_VllmWorker": 7}, (), ended={5: 78 << 8})
    assert fleet.exit_codes == {5: 78}
    for pid in range(6, 6 + REMEMBERED_ENDS):
        link.on_end(pid, 9)
    assert list(fleet.exit_codes.items()) == [(pid, -9) for pid in range(6, 6 + REMEMBERED_ENDS)]


def test_a_server_that_ended_before_it_was_adopted_is_started_anew() -> None:
    fleet, link = fleet_that_adopts(ns_etcd=1 << 30, ns_nats=1 << 29)
    link.on_end(1 << 30, 9)
    held_process(fleet, "ns_etcd", "--name", "x").spawn()
    assert link.started == ["ns_etcd"]
    assert fleet.adoptable == {"ns_nats": 1 << 29}


class System:
    """A system that refuses to fork for a while, as one out of processes does (EAGAIN)."""

    refuses = True


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    state, spawn = System(), Process.spawn

    def refused_or_not(process: Any) -> None:
        if state.refuses:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        spawn(process)

    monkeypatch.setattr(Process, "spawn", refused_or_not)
    return state


def watcher(respawn: bool) -> RetryingWatcher:
    made = RetryingWatcher(
        "etcd", sys.executable, args=["-c", "input()"], respawn=respawn, max_retry=1, graceful_timeout=1
    )
    made.initialize(None, {}, None)
    return made


async def test_a_server_whose_start_is_refused_is_started_when_the_system_can(system: System) -> None:
    server = watcher(respawn=True)
    await server._start()
    assert not server.is_stopped() and not server.processes
    system.refuses = False
    try:
        await server.manage_processes()  # circus' look, every few seconds
        assert len(server.processes) == 1
    finally:
        await server._stop()


async def test_a_worker_whose_start_is_refused_is_the_fleet_plugins_to_start_again(system: System) -> None:
    worker = watcher(respawn=False)
    await worker._start()
    assert worker.is_stopped()


async def test_a_server_that_a_person_stops_stays_stopped(system: System) -> None:
    server = watcher(respawn=True)
    system.refuses = False
    await server._start()
    await server._stop()
    await server.manage_processes()
    assert server.is_stopped() and not server.processes
