"""The watch decides by what driver and statefile say, writes down what has changed, and reports it once."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from dynaplan.contract.gpu_standing import SET_APART, GpuStandings
from dynaplan.contract.gpus import GpuHealth
from dynaplan.fleet.plugin.gpu_watch import GpuWatch
from tests.fakes.circus import FakeTerminal
from tests.fakes.clock import ManualClock
from tests.fakes.polling import eventually
from tests.unit.fleet.rules.graphs import worker

FLEET = (worker("VllmWorker", gpus=(0,)),)


class Kept:
    """Store and statefile in one: what is replaced is there at the next look."""

    def __init__(self) -> None:
        self.planner_keys: dict[str, str] = {}
        self.is_away = False

    def replace(self, name: str, before: str, after: str) -> None:
        if not self.is_away and self.planner_keys.get(name, "") == before:
            self.planner_keys[name] = after


async def test_an_ill_gpu_is_set_apart_while_the_store_is_away_and_reported_once() -> None:
    health, kept, terminal = {1: GpuHealth(xids=(79,))}, Kept(), FakeTerminal()
    watch, wake = GpuWatch(lambda: health, ManualClock()), asyncio.Event()
    task = asyncio.create_task(watch.run(wake))
    await eventually(wake.is_set)

    def apart() -> set[int]:
        return set(watch.judge(FLEET, {0, 1}, cast(Any, kept), cast(Any, kept), terminal))

    kept.is_away = True
    assert apart() == apart() == {1}
    assert SET_APART not in kept.planner_keys
    kept.is_away = False
    assert apart() == {1}
    assert GpuStandings.from_text(kept.planner_keys[SET_APART]).apart.keys() == {1}
    assert len(terminal.lines) == len(watch.events) == 1

    before = GpuStandings.from_text(kept.planner_keys[SET_APART])
    kept.planner_keys[SET_APART] = before.with_gpu(1, before.by_gpu[1].readmitted()).to_text()
    assert apart() == set()
    assert terminal.lines[1] == "GPU 1 is in use again."
    kept.planner_keys[SET_APART] = "nonsense"
    assert apart() == {1}
    task.cancel()
