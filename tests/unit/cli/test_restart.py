"""``dynaplan restart``: a new worker first, then the old one leaves."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import restart
from dynaplan.cli.restart import WorkerRestart, chosen_workers, restart_process
from dynaplan.cli.scale_counts import ScaleTimes
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.holds import HOLDS, Hold, RoleHolds
from dynaplan.contract.store_keys import (
    DesiredCounts,
    first_to_leave,
    fleet_key,
    planner_prefix,
    scaling_key,
    scaling_prefix,
)
from dynaplan.fleet import circus_client, deployments, scale_progress
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, PermanentError, TemporaryError
from tests.unit.fleet.rules.graphs import worker

OLD = replace(worker("VllmWorker", gpus=(0,)), pid=7)
NEW = replace(worker("VllmWorker_1", gpus=(1,)), pid=8)
FRONTEND = Worker("dynamo_Frontend", "Frontend", Role.FRONTEND)


class Box:
    """A deployment of one decode worker that does at once what is asked for, as the fleet plugin does."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.workers: tuple[Worker, ...] = (OLD,)
        self.asked: list[tuple[int, str, Hold | None]] = []
        self.replaced: list[str] = []
        self.fails = False
        self.later: tuple[tuple[Worker, ...], ...] = ()
        self.overtaken_by: tuple[tuple[Worker, ...], ...] = ()
        self.after_restart: tuple[tuple[Worker, ...], ...] = (
            (replace(OLD, pid=9, state=WorkerState.READY),),
        )
        self.hold_at_restart: Hold | None = None

    def found(self, namespace: str) -> Any:
        if self.overtaken_by:
            self.workers, *later = self.overtaken_by
            self.overtaken_by = self.after_restart = tuple(later)
        return SimpleNamespace(namespace="dynamo", workers=self.workers, circus_endpoint="ipc://nowhere")

    async def wait_carried_out(
        self, found: Any, store: Any, request: Any, timeout_s: float, watch: Any
    ) -> None:
        keys = {item.key: item.value for item in await store.list(scaling_prefix("dynamo"))}
        counts = DesiredCounts.from_keys("dynamo", keys)
        leaving = first_to_leave("dynamo", keys, counts.decision_id)
        holds = RoleHolds.from_text(keys.get(scaling_key("dynamo", HOLDS), RoleHolds().to_text()))
        self.asked.append((counts.num_decode_workers, leaving, holds.decode))
        if self.fails and counts.num_decode_workers == 2:
            raise PermanentError("1 of 2 decode workers ready")
        if counts.num_decode_workers == 2:
            self.workers = (OLD, NEW)
        elif leaving and self.later:
            self.overtaken_by = self.later
            raise scale_progress.DecisionSuperseded("overtaken by decision 7: decode=2")
        elif leaving:
            self.workers = tuple(each for each in self.workers if each.name != leaving)

    def client(self, endpoint: str, *, sender: str) -> Any:
        """Be the client of a person: as the fleet plugin's, ``restart`` would have circus restart it."""
        assert sender == circus_client.A_PERSON
        return self

    async def call(self, command: str, **properties: Any) -> None:
        self.replaced.append(f"{command} {properties['name']}")
        self.hold_at_restart = (await _holds(self)).decode
        self.workers, *later = self.after_restart
        self.after_restart = self.overtaken_by = tuple(later)

    def close(self) -> None:
        """Close nothing: it is no connection."""


async def _holds(box: Box) -> RoleHolds:
    item = await box.store.get(scaling_key("dynamo", HOLDS))
    return RoleHolds.from_text(item.value) if item else RoleHolds()


@pytest.fixture
async def box(monkeypatch: pytest.MonkeyPatch) -> Box:
    store = MemoryStore(SystemClock())
    box = Box(store)
    prefix = planner_prefix("dynamo")
    for name, value in {"num_decode_workers": "1", "decision_id": "4", "scaled_decision_id": "4"}.items():
        await store.put(prefix + name, value)
    monkeypatch.setattr(deployments, "find_deployment", box.found)
    monkeypatch.setattr(scale_progress, "check_alive", lambda found: None)
    monkeypatch.setattr(scale_progress, "wait_carried_out", box.wait_carried_out)
    monkeypatch.setattr(circus_client, "CircusClient", box.client)
    monkeypatch.setattr(restart, "planner_settings", lambda found: PlannerSettings(max_gpu_budget=2))
    monkeypatch.setattr(restart, "expected_times", lambda found, wanted: ScaleTimes(1.0, 1.0))
    return box


async def test_the_new_one_is_ready_before_the_old_one_leaves_and_the_planner_keeps_off(box: Box) -> None:
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    assert await WorkerRestart(box.store, "dynamo", OLD).run() == NEW.name
    (more, nobody, held), (less, leaving, free) = box.asked
    assert (more, nobody, less, leaving) == (2, "", 1, OLD.name)
    assert held
    assert (held.at_least, held.at_most, free) == (2, 2, None)
    assert box.workers == (NEW,)


async def test_a_hold_of_before_is_there_again(box: Box) -> None:
    mine = RoleHolds(decode=Hold(at_least=1, at_most=1))
    await box.store.put(scaling_key("dynamo", HOLDS), mine.to_text())
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    await WorkerRestart(box.store, "dynamo", OLD).run()
    assert box.asked[-1][2] == mine.decode


def alice_holds(number: int) -> RoleHolds:
    return RoleHolds(decode=Hold(at_least=number, at_most=number, by="alice"))


@pytest.mark.parametrize(
    ("persons", "number", "left"),
    [
        (RoleHolds(), 2, 1),
        (alice_holds(2), 2, 2),
        (alice_holds(3), 3, 3),
        (alice_holds(0), 0, 0),
    ],
)
async def test_who_scales_holds_or_releases_the_role_meanwhile_is_not_overruled(
    box: Box, monkeypatch: pytest.MonkeyPatch, persons: RoleHolds, number: int, left: int
) -> None:
    async def wait_carried_out(found: Any, store: Any, *others: Any) -> None:
        await box.wait_carried_out(found, store, *others)
        if len(box.asked) == 1:
            await store.put(scaling_key("dynamo", HOLDS), persons.to_text())
            await _ask_for(box, number)

    monkeypatch.setattr(scale_progress, "wait_carried_out", wait_carried_out)
    await box.store.put(scaling_key("dynamo", HOLDS), alice_holds(1).to_text())
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    with suppress(TemporaryError):  # the old one is still there, since nobody has to leave
        await WorkerRestart(box.store, "dynamo", OLD).run()
    assert await _holds(box) == persons
    assert await _asked_number(box) == left


async def test_a_restart_that_fails_takes_nothing_back_of_what_a_person_asked_for_meanwhile(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def overtaken(*_: Any) -> None:
        await box.store.put(scaling_key("dynamo", HOLDS), alice_holds(4).to_text())
        await _ask_for(box, 4)
        raise scale_progress.DecisionSuperseded("overtaken by decision 7: decode=4")

    monkeypatch.setattr(scale_progress, "wait_carried_out", overtaken)
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    with pytest.raises(PermanentError, match="overtaken"):
        await WorkerRestart(box.store, "dynamo", OLD).run()
    assert (await _asked_number(box), await _holds(box)) == (4, alice_holds(4))


async def test_when_the_new_one_fails_the_old_one_goes_on(box: Box) -> None:
    box.fails = True
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    with pytest.raises(PermanentError, match=f"no new worker took the place of {OLD.name}"):
        await WorkerRestart(box.store, "dynamo", OLD).run()
    keys = {item.key: item.value for item in await box.store.list(scaling_prefix("dynamo"))}
    assert keys[planner_prefix("dynamo") + "num_decode_workers"] == "1"
    assert await _holds(box) == RoleHolds()
    assert box.workers == (OLD,)


async def test_it_is_done_when_the_planner_asks_for_other_numbers_while_the_old_one_drains(box: Box) -> None:
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    draining = (replace(OLD, state=WorkerState.DRAINING), NEW)
    box.later = (box.workers, draining, draining, (NEW,))
    assert await WorkerRestart(box.store, "dynamo", OLD).run() == NEW.name


async def test_an_old_one_that_the_planner_keeps_is_said_to_be_there(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "DRAIN_START_TIMEOUT_S", 0.0)
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    box.later = ((OLD, NEW),)
    with pytest.raises(TemporaryError, match=f"{OLD.name} is still there"):
        await WorkerRestart(box.store, "dynamo", OLD).run()


@pytest.mark.parametrize("fleet", ['{"free_gpus": []}', "{}", "nonsense"])
async def test_on_a_full_box_the_old_one_leaves_first(box: Box, fleet: str) -> None:
    await box.store.put(fleet_key("dynamo"), fleet)
    assert await WorkerRestart(box.store, "dynamo", OLD).run() == OLD.name
    assert box.replaced == [f"restart {OLD.name}"]


async def _ask_for(box: Box, number: int) -> None:
    await box.store.put(planner_prefix("dynamo") + "num_decode_workers", str(number))


async def _asked_number(box: Box) -> int:
    item = await box.store.get(planner_prefix("dynamo") + "num_decode_workers")
    return int(item.value) if item else -1


async def test_on_a_full_box_one_is_replaced_though_another_waits_for_a_gpu(box: Box) -> None:
    await _ask_for(box, 3)
    box.workers = (OLD, NEW)
    starting = replace(OLD, pid=9, state=WorkerState.STARTING)
    box.after_restart = ((NEW,), (starting, NEW), (replace(starting, state=WorkerState.READY), NEW))
    assert await WorkerRestart(box.store, "dynamo", OLD).run() == OLD.name
    assert not box.after_restart


async def test_on_a_full_box_the_planner_keeps_off_until_the_new_one_is_ready(box: Box) -> None:
    await WorkerRestart(box.store, "dynamo", OLD).run()
    assert box.hold_at_restart
    assert (box.hold_at_restart.at_least, box.hold_at_restart.at_most) == (1, 1)
    assert await _holds(box) == RoleHolds()


async def test_on_a_full_box_nobody_is_waited_for_when_fewer_are_asked_for_meanwhile(box: Box) -> None:
    await _ask_for(box, 1)
    box.workers = (OLD, NEW)
    box.after_restart = ((NEW,),)
    assert await WorkerRestart(box.store, "dynamo", OLD).run() == "nobody, as fewer are asked for"


async def test_on_a_full_box_a_new_one_that_fails_is_told_with_its_reason(box: Box) -> None:
    box.after_restart = ((replace(OLD, pid=9, state=WorkerState.FAILED, reason="exit code 78"),),)
    with pytest.raises(PermanentError, match="does not start: exit code 78"):
        await WorkerRestart(box.store, "dynamo", OLD).run()
    assert await _holds(box) == RoleHolds()


async def test_beyond_the_gpu_budget_the_old_one_leaves_first_too(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "planner_settings", lambda found: PlannerSettings(max_gpu_budget=1))
    await box.store.put(fleet_key("dynamo"), '{"free_gpus": [1]}')
    await WorkerRestart(box.store, "dynamo", OLD).run()
    assert box.replaced == [f"restart {OLD.name}"]


def test_workers_are_chosen_by_name_role_or_component_and_engines_alone_when_none_is_named() -> None:
    workers = (FRONTEND, OLD, NEW)
    assert chosen_workers(None, workers) == [OLD, NEW]
    assert chosen_workers(NEW.name, workers) == [NEW]
    assert chosen_workers("decode", workers) == chosen_workers("VllmWorker", workers) == [OLD, NEW]
    assert chosen_workers("frontend", workers) == chosen_workers(FRONTEND.name, workers) == [FRONTEND]
    leaving = replace(NEW, state=WorkerState.DRAINING)
    assert chosen_workers("decode", (OLD, leaving)) == chosen_workers(None, (OLD, leaving)) == [OLD]
    assert chosen_workers(NEW.name, (OLD, leaving)) == [leaving]
    with pytest.raises(ConfigError, match=r"(?s)restart frontent: .*Did you mean 'frontend'"):
        chosen_workers("frontent", workers)


class Process:
    """A deployment of one frontend; the fleet plugin's next steps are the fleets of ``steps``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: tuple[Worker, ...]) -> None:
        self.steps = [(HERE,), *steps]
        self.told: list[str] = []
        monkeypatch.setattr(deployments, "find_deployment", self.found)
        monkeypatch.setattr(circus_client, "CircusClient", self.client)
        monkeypatch.setattr(restart, "expected_times", lambda found, wanted: ScaleTimes(1.0, 1.0))
        monkeypatch.setattr(restart, "WORKERS_POLL_S", 0.001)

    def found(self, namespace: str) -> Any:
        workers = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        return SimpleNamespace(namespace="dynamo", workers=workers, circus_endpoint="ipc://nowhere")

    def client(self, endpoint: str, *, sender: str) -> Any:
        """Be the client of a person: as the fleet plugin's, ``restart`` would have circus restart it."""
        assert sender == circus_client.A_PERSON
        return self

    async def call(self, command: str, name: str) -> None:
        self.told.append(f"{command} {name}")

    def close(self) -> None:
        self.told.append("closed")

    async def restarted(self, timeout_s: float | None = None) -> str:
        found: Any = SimpleNamespace(namespace="dynamo", circus_endpoint="ipc://nowhere")
        return await restart_process(found, HERE, timeout_s)


HERE = replace(FRONTEND, state=WorkerState.READY, pid=7)
THERE = replace(HERE, name="dynamo_Frontend_1", pid=8)


async def test_a_frontend_is_restarted_when_the_new_one_is_ready_and_the_old_one_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaving = replace(HERE, state=WorkerState.DRAINING)
    coming = replace(THERE, state=WorkerState.STARTING)
    process = Process(monkeypatch, (HERE, coming), (HERE, THERE), (leaving, THERE), (THERE,))
    assert await process.restarted() == THERE.name
    assert process.told == [f"restart {HERE.name}", "closed"]


async def test_a_frontend_that_does_not_start_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crashed = replace(THERE, state=WorkerState.BACKOFF, reason="exit code 1")
    with pytest.raises(PermanentError, match="dynamo_Frontend_1 does not start: exit code 1"):
        await Process(monkeypatch, (HERE, crashed)).restarted()


async def test_one_that_had_failed_is_restarted_and_its_old_failure_is_no_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = replace(HERE, state=WorkerState.FAILED, pid=0, reason="bad settings")
    started = replace(HERE, pid=9)
    process = Process(monkeypatch, (failed,), (replace(started, state=WorkerState.STARTING),), (started,))
    process.steps[0] = (failed,)
    assert await process.restarted() == HERE.name
    process = Process(monkeypatch, (failed,), (replace(started, state=WorkerState.STARTING),), (failed,))
    process.steps[0] = (failed,)
    with pytest.raises(PermanentError, match="does not start: bad settings"):
        await process.restarted()


async def test_a_frontend_is_restarted_though_another_one_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(THERE, state=WorkerState.BACKOFF, reason="exit code 1")
    again = replace(broken, pid=11, retry_at_s=9.0)
    process = Process(monkeypatch, (HERE, again), (replace(HERE, pid=9), again))
    process.steps[0] = (HERE, broken)
    assert await process.restarted() == HERE.name


async def test_a_frontend_that_is_not_replaced_in_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemporaryError, match="nothing has taken the place of dynamo_Frontend within"):
        await Process(monkeypatch, (HERE,)).restarted(0.01)
