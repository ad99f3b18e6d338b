"""Processes that stand still are ended, and nobody is accused of it wrongly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import EXIT_CANNOT_START, Role, WorkerState
from dynaplan.graph.model import ServiceSpec
from tests.unit.fleet.plugin.box import GRAPH, Box, frozen


async def test_a_worker_that_stands_still_is_killed_and_starts_again_as_after_a_crash(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    before = await frozen(box, "ns_VllmWorker")
    assert box.health.asked == {"ns_VllmWorker": f"http://127.0.0.1:{before.pid}"}
    box.health.silent_s = {"ns_VllmWorker": 4}
    await box.reconciler.reconcile_once()
    assert box.processes.killed == []
    box.health.silent_s = {"ns_VllmWorker": 5}
    box.frozen.clear()
    await box.reconciler.reconcile_once()
    assert box.processes.killed == [before.pid]
    await box.reconciler.reconcile_once()
    box.now += 1
    await box.settle()
    after = box.reconciler.workers["ns_VllmWorker"]
    assert (after.state, after.gpus, len(after.restarts_s)) == (WorkerState.READY, before.gpus, 1)
    assert [line for line in box.said if "stands still: no answer for 5 s" in line]
    assert box.health.asked == {}


async def test_who_was_never_registered_is_not_asked_whether_it_stands_still(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.frozen = {"ns_VllmWorker"}
    await box.started()
    assert box.states()["ns_VllmWorker"] == "starting"
    assert box.health.asked == {}


async def test_a_planner_whose_heartbeat_stops_is_killed_and_started_again(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.launch = replace(
        box.launch, graph=replace(GRAPH, services=(*GRAPH.services, ServiceSpec("Planner", Role.PLANNER)))
    )
    box.new_reconciler()
    await box.started()
    pid = box.reconciler.workers["ns_Planner"].pid
    box.stalls.overdue = {"ns_Planner": 89.0, "ns_VllmWorker": 1000.0}
    await box.settle()
    assert box.processes.killed == []
    box.stalls.overdue["ns_Planner"] = 91.0
    await box.reconciler.reconcile_once()
    assert box.processes.killed == [pid]
    box.stalls.overdue = {}
    await box.reconciler.reconcile_once()
    box.now += 1
    await box.settle()
    assert box.reconciler.workers["ns_Planner"].pid not in (0, pid)
    assert "ns_Planner stands still: no answer for 91 s. It is killed." in box.said


async def test_with_a_health_timeout_of_0_nobody_is_asked(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.launch.config["VllmWorker"]["health-timeout"] = 0
    await frozen(box, "ns_VllmWorker")
    assert box.health.asked == {}


async def test_who_was_told_to_leave_is_not_asked(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.link.counts = DesiredCounts(1, 0, 1, 0)
    await box.reconciler.reconcile_once()
    await frozen(box, "ns_VllmWorker")
    assert box.health.asked == {}


async def test_while_the_store_is_away_nobody_is_asked(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.link.instances = None
    await box.reconciler.reconcile_once()
    assert box.health.asked == {}


async def test_a_new_reconciler_still_knows_where_to_ask(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    before = await frozen(box, "ns_VllmWorker")
    box.health.asked = {}
    box.new_reconciler()
    await box.reconciler.reconcile_once()
    assert box.health.asked == {"ns_VllmWorker": before.url}


async def test_a_crash_beside_an_out_of_memory_kill_says_so_and_a_later_one_does_not(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    for kills, words in ((2, "ended 2 processes of this machine meanwhile"), (0, "or somebody's kill -9")):
        box.processes.killed_for_memory += kills
        box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), -9)
        await box.settle()
        assert words in box.said[-1]
        box.now += 100
        await box.settle()


async def test_a_worker_is_not_given_the_exit_code_of_an_earlier_process_with_its_pid(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.reconciler.record_exit(box.reconciler.workers["ns_VllmWorker"].pid, EXIT_CANNOT_START)
    await box.reconciler.reconcile_once()
    box.circus.end("ns_VllmWorker")
    await box.reconciler.reconcile_once()
    box.now += 1
    await box.settle()
    after = box.reconciler.workers["ns_VllmWorker"]
    assert (after.state, len(after.restarts_s)) == (WorkerState.READY, 1)
    assert "ns_VllmWorker ended unasked (" in box.said[-1]


async def test_a_worker_to_replace_is_drained_and_no_crash_is_counted(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.reconciler.request_replacement("ns_VllmWorker")
    await box.reconciler.reconcile_once()
    box.register()
    assert box.states()["ns_VllmWorker"] == "draining"
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), 0)
    await box.settle()
    assert box.states()["ns_VllmWorker_1"] == "ready"
    assert "ns_VllmWorker" not in box.reconciler.workers
    assert box.reconciler.workers["ns_VllmWorker_1"].restarts_s == ()
