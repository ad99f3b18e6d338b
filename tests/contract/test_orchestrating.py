"""``dynaplan orchestrate``'s loop: real commands, a store in memory."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from dynaplan.contract.store_keys import planner_prefix
from dynaplan.planner.virtual.client import VirtualConnectorClient
from dynaplan.planner.virtual.orchestrator import Orchestrator
from dynaplan.store.memory import MemoryStore
from dynaplan.util.backoff import Backoff
from dynaplan.util.clock import SystemClock
from tests.contract.runtimes import runtime_of
from tests.fakes.polling import eventually


class Situation:
    """A planner's keys, and an orchestrator that appends to a file what its command saw."""

    def __init__(self, directory: Path) -> None:
        self.store = MemoryStore(SystemClock())
        self.seen = directory / "seen"
        self.directory = directory
        self.client = VirtualConnectorClient(runtime_of(self.store))

    def orchestrator(self, then: str = "true") -> Orchestrator:
        says = 'echo "$DECISION_ID ${NUM_PREFILL_WORKERS-none} $NUM_DECODE_WORKERS" >> seen'
        environment = {"PATH": os.environ["PATH"]}
        command = f"cd '{self.directory}'; {says}; {then}"
        return Orchestrator(self.client, command, environment, Backoff(0.01, 0.02))

    async def ask(self, **numbers: int) -> None:
        for name, number in numbers.items():
            await self.store.put(planner_prefix("ns") + name, str(number))

    async def acknowledged(self) -> int:
        return (await self.client.get()).scaled_decision_id

    def lines(self) -> list[str]:
        return self.seen.read_text().splitlines() if self.seen.exists() else []


@pytest.fixture
def situation(tmp_path: Path) -> Situation:
    return Situation(tmp_path)


async def test_each_decision_runs_the_command_and_is_acknowledged_when_it_succeeds(situation) -> None:
    await situation.ask(num_decode_workers=2, decision_id=0)
    orchestrator = situation.orchestrator()
    await orchestrator.carry_out_next()
    assert (situation.lines(), await situation.acknowledged()) == (["0 none 2"], 0)
    await situation.ask(num_prefill_workers=1, num_decode_workers=3, decision_id=1)
    await orchestrator.carry_out_next()
    assert (situation.lines(), await situation.acknowledged()) == (["0 none 2", "1 1 3"], 1)


async def test_a_command_that_fails_is_run_again_and_nothing_is_acknowledged_before(situation) -> None:
    await situation.ask(num_decode_workers=2, decision_id=5)
    await situation.orchestrator("[ $(wc -l < seen) -ge 3 ]").carry_out_next()
    assert situation.lines() == ["5 none 2"] * 3
    assert await situation.acknowledged() == 5


async def test_of_decisions_made_while_the_command_runs_the_newest_comes_next(situation) -> None:
    await situation.ask(num_decode_workers=2, decision_id=5)
    running = asyncio.ensure_future(situation.orchestrator("until [ -e go ]; do sleep 0.01; done").run())
    await eventually(lambda: situation.lines() == ["5 none 2"])
    for decision_id in (6, 7):
        await situation.ask(num_decode_workers=decision_id, decision_id=decision_id)
    (situation.directory / "go").touch()
    await eventually(lambda: situation.lines() == ["5 none 2", "7 none 7"])

    async def is_acknowledged() -> bool:
        return await situation.acknowledged() == 7

    await eventually(is_acknowledged)
    running.cancel()


async def test_a_cancelled_orchestrator_ends_the_command_with_all_that_it_started(situation) -> None:
    await situation.ask(num_decode_workers=2, decision_id=5)
    running = asyncio.ensure_future(situation.orchestrator("sleep 600 & echo $! > child; wait; true").run())
    child = await eventually(lambda: _number(situation.directory / "child"))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))
    assert await situation.acknowledged() == -1


async def test_a_second_cancel_kills_what_has_not_heeded_the_first(situation) -> None:
    await situation.ask(num_decode_workers=2, decision_id=5)
    orchestrator = situation.orchestrator("trap '' TERM; echo $$ > child; exec sleep 600")
    running = asyncio.ensure_future(orchestrator.run())
    child = await eventually(lambda: _number(situation.directory / "child"))
    running.cancel()
    for _ in range(10):  # SIGTERM is sent, and the end is waited for
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await eventually(lambda: not Path(f"/proc/{child}").exists() or _is_zombie(child))


def _number(file: Path) -> int:
    return int(file.read_text() or 0) if file.exists() else 0


def _is_zombie(pid: int) -> bool:
    return ") Z" in Path(f"/proc/{pid}/stat").read_text()
