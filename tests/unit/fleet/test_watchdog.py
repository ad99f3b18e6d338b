"""The watchdog: checks go on, a plugin that stands still is killed, services without hope are reported."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from dynaplan.fleet.watchdog import FailureWatch, PluginWatchdog, watching
from dynaplan.graph.lifecycle import Worker
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, Heartbeat
from dynaplan.process.identity import ProcessIdentity
from tests.fakes.clock import ManualClock
from tests.unit.fleet.rules.graphs import FAILED, READY, worker


class Beats:
    """Heartbeats in memory; the plugin's last beat is the test's."""

    def __init__(self) -> None:
        self.beaten: list[str] = []
        self.plugin_beat_s = 1000.0

    def beat(self, name: str, every_s: float) -> None:
        self.beaten.append(name)

    def read(self, name: str) -> Heartbeat | None:
        assert name == PLUGIN_HEARTBEAT
        return Heartbeat(ProcessIdentity(7, 70, "boot"), self.plugin_beat_s, 0.0, 1.0, True)


async def test_a_plugin_that_stands_still_is_killed_once_it_is_certain_and_the_user_hears_of_it() -> None:
    clock, beats, killed, said = ManualClock(), Beats(), list[int](), list[str]()
    arbiter = SimpleNamespace(get_watcher=lambda name: SimpleNamespace(processes={7: None}))
    processes = SimpleNamespace(identify=lambda pid: 70, kill_group=lambda pid, _: killed.append(pid))
    watch = PluginWatchdog(cast(Any, arbiter), "ns_fleet", beats, cast(Any, processes), clock, said.append)
    for _ in range(20):
        await watch.check()
        clock.advance(1.0)
    assert (killed, said) == ([], [])
    for _ in range(3):
        await watch.check()
        clock.advance(1.0)
    assert set(killed) == {7}
    assert "stands still" in said[0]


async def test_a_task_that_fails_ends_neither_the_vigil_nor_the_other_tasks() -> None:
    done: list[str] = []

    async def failing() -> None:
        raise OSError("no space left on device")

    async def working() -> None:
        done.append("worked")

    async with watching([failing, working], ManualClock()):
        while len(done) < 3:
            await asyncio.sleep(0)
    assert done[:3] == ["worked"] * 3


LOST = replace(worker("VllmWorker", FAILED), reason="can never start (exit code 78)")


async def test_a_service_without_hope_is_named_once_and_again_when_it_is_lost_anew() -> None:
    workers: list[Worker] = [worker("VllmWorker", READY)]
    said, lost = list[str](), list[bool]()
    watch = FailureWatch(
        cast(Any, SimpleNamespace(read=lambda: workers)),
        Path("/logs"),
        said.append,
        lambda: lost.append(True),
    )
    await watch.check()
    assert said == []
    for _ in range(2):
        workers[:] = [LOST]
        await watch.check()
        await watch.check()
        workers[:] = []
        await watch.check()
    line = "No VllmWorker can start: can never start (exit code 78)\n    log: /logs/dynamo_VllmWorker.log"
    assert said == [line, line]
    assert lost == [True, True]
