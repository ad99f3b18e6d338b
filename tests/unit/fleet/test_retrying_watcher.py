"""A start that the system refuses, under circus' own watcher."""

from __future__ import annotations

import errno
import sys
from typing import Any

import pytest
from circus.process import Process

from dynaplan.fleet.reattach.processes import RetryingWatcher


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
