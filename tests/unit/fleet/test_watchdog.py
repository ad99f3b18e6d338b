"""What ``serve`` looks after: its own heartbeat, and a fleet plugin that stands still."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from dynaplan.fleet.heartbeats import PLUGIN_HEARTBEAT, SERVE_HEARTBEAT, Heartbeat
from dynaplan.fleet.watchdog import PluginWatchdog, Watchdog
from dynaplan.process.identity import ProcessIdentity
from tests.fakes.clock import ManualClock


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
    assert set(beats.beaten) == {SERVE_HEARTBEAT}


async def test_a_task_that_fails_ends_neither_the_vigil_nor_the_other_tasks() -> None:
    done: list[str] = []

    async def failing() -> None:
        raise OSError("no space left on device")

    async def working() -> None:
        done.append("worked")

    vigil = asyncio.create_task(Watchdog([failing, working], ManualClock()).run())
    while len(done) < 3:
        await asyncio.sleep(0)
    assert not vigil.done()
    vigil.cancel()
