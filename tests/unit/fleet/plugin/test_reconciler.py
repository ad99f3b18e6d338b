"""What the reconciler does, pass by pass, over circus, processes and a store in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.fleet.plugin import reconciler
from dynaplan.fleet.plugin.gpu_availability import NOT_READ
from dynaplan.fleet.plugin.pending_workers import REPORT_AFTER_S, PendingWorkers
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.graph.model import ServiceSpec
from dynaplan.util.errors import ArbiterBusy
from tests.fakes.polling import eventually
from tests.unit.fleet.plugin.box import Box, frozen


async def test_it_starts_what_the_graph_asks_for_and_writes_it_down_before(tmp_path: Path) -> None:
    box = Box(tmp_path)
    at_add: list[str] = []
    add = box.circus.add

    async def adding(name: str, *rest: Any) -> int:
        at_add.append(next(worker.state.value for worker in box.written if worker.name == name))
        return await add(name, *rest)

    box.circus.add = adding  # type: ignore[assignment,method-assign]
    await box.started()
    assert at_add == ["starting"] * 3
    assert box.states() == dict.fromkeys(["ns_Frontend", "ns_VllmWorker", "ns_PrefillWorker"], "ready")
    assert box.circus.environments["ns_VllmWorker"]["CUDA_VISIBLE_DEVICES"] == "GPU-SIM-0"
    assert box.claims.held == {"GPU-SIM-0", "GPU-SIM-1"}


async def test_a_decision_is_acknowledged_when_its_workers_are_ready_and_not_before(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.link.acknowledged.clear()
    box.link.counts = DesiredCounts(1, 2, 7, 0)
    await box.reconciler.reconcile_once()
    assert box.states()["ns_VllmWorker_1"] == "starting"
    assert box.link.acknowledged == []
    box.register()
    await box.reconciler.reconcile_once()
    assert box.link.acknowledged == [7]


async def test_the_first_counts_are_the_present_workers_or_what_the_statefile_remembers(
    tmp_path: Path,
) -> None:
    box = await Box(tmp_path).started(decode=2)
    box.link.counts = DesiredCounts()
    await box.reconciler.reconcile_once()
    assert box.link.first == {"num_prefill_workers": "1", "num_decode_workers": "2", "decision_id": "0"}
    box.link.first = {}
    box.statefile.planner_keys = {
        "num_prefill_workers": "1",
        "num_decode_workers": "3",
        "decision_id": "7",
        "holds": "{}",
    }
    await box.reconciler.reconcile_once()
    assert box.link.first == {}, "what the statefile remembers comes back instead"


async def test_with_environment_virtual_decisions_are_left_to_others_and_not_acknowledged(
    tmp_path: Path,
) -> None:
    box = await Box(tmp_path).started(decode=2)
    planner = ServiceSpec("Planner", Role.PLANNER)
    graph = replace(box.launch.graph, services=(*box.launch.graph.services, planner))
    config = {**box.launch.config, "Planner": {"environment": "virtual"}}
    box.launch = replace(box.launch, graph=graph, config=config)
    box.new_reconciler()
    box.link.acknowledged.clear()
    for asked in (DesiredCounts(), DesiredCounts(1, 5, 7, 0)):
        box.link.counts = asked
        await box.settle()
    assert box.states().keys() >= {"ns_VllmWorker", "ns_VllmWorker_1"}
    assert len([name for name in box.states() if "VllmWorker" in name]) == 2
    assert (box.link.acknowledged, box.link.first) == ([], {})


async def test_nothing_is_scaled_while_the_store_is_away_but_a_crashed_worker_is_restarted(
    tmp_path: Path,
) -> None:
    box = await Box(tmp_path).started(decode=2)
    box.link.counts, box.link.instances = None, None
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), -9)
    await box.reconciler.reconcile_once()
    assert box.circus.pids["ns_VllmWorker"] != 0
    assert len(box.reconciler.workers) == 4


async def test_a_crashed_worker_is_dropped_by_routers_and_restarted_on_its_own_gpus(tmp_path: Path) -> None:
    box = await Box(tmp_path).started(decode=2)
    lease, gpus = (
        box.reconciler.workers["ns_VllmWorker"].instance_id,
        box.reconciler.workers["ns_VllmWorker"].gpus,
    )
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), 1)
    await box.settle()
    assert box.link.revoked == [lease]
    assert box.reconciler.workers["ns_VllmWorker"].gpus == gpus
    assert box.states()["ns_VllmWorker"] == "ready"


async def test_a_decode_worker_leaves_by_its_lease_and_its_gpus_are_free_when_it_is_gone(
    tmp_path: Path,
) -> None:
    box = await Box(tmp_path).started(decode=2)
    leaving = box.reconciler.workers["ns_VllmWorker_1"]
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.reconciler.reconcile_once()
    assert box.link.revoked == [leaving.instance_id]
    assert box.circus.signals == []
    (gpu,) = leaving.gpus
    assert f"GPU-SIM-{gpu}" in box.claims.held
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker_1"), 0)
    await box.settle()
    assert "ns_VllmWorker_1" not in box.reconciler.workers
    assert "ns_VllmWorker_1" not in box.circus.pids
    assert f"GPU-SIM-{gpu}" not in box.claims.held
    assert len(box.claims.held) == 2


async def test_a_prefill_worker_leaves_by_sigterm_once(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.link.counts = DesiredCounts(0, 1, 1, 0)
    await box.settle()
    assert box.circus.signals == [("ns_PrefillWorker", SIGTERM)]


async def test_a_decode_worker_gets_sigterm_when_the_store_does_not_answer(tmp_path: Path) -> None:
    box = await Box(tmp_path).started(decode=2)
    leaving = box.reconciler.workers["ns_VllmWorker_1"]
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.reconciler.reconcile_once()
    box.link.unanswered.add(leaving.instance_id)
    await box.reconciler.reconcile_once()
    assert box.circus.signals == [("ns_VllmWorker_1", SIGTERM)]


async def test_who_does_not_leave_is_killed_at_the_deadline_and_reported(tmp_path: Path) -> None:
    box = await Box(tmp_path).started(decode=2)
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.settle()
    box.now += 5
    await box.settle()
    assert box.circus.signals == [("ns_VllmWorker_1", SIGTERM)]
    assert box.processes.killed == []
    box.now += 8
    await box.settle()
    assert len(box.processes.killed) == 1
    assert any("ns_VllmWorker_1 did not leave" in line for line in box.said)
    assert box.link.fleet["killed_at_deadline"] == 1


async def test_a_worker_that_can_never_start_is_not_retried_and_shows_the_end_of_its_log(
    tmp_path: Path,
) -> None:
    (tmp_path / "ns_VllmWorker.log").write_text("one\ntwo: no such model\n")
    box = await Box(tmp_path).started()
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), 78)
    await box.settle()
    box.now += 1000
    await box.settle()
    assert box.states()["ns_VllmWorker"] == "failed"
    assert box.circus.pids["ns_VllmWorker"] == 0
    assert any("has failed" in line and "two: no such model" in line for line in box.said)
    assert box.claims.held == {"GPU-SIM-1"}


async def test_a_new_decision_tries_failed_workers_again(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), 78)
    await box.settle()
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.settle()
    assert box.states()["ns_VllmWorker"] == "ready"


@pytest.mark.parametrize(
    "earlier", [(), (7, -1)], ids=["which the plugin writes first", "which a store has lost meanwhile"]
)
async def test_a_decision_that_is_no_new_one_does_not_try_failed_workers_again(
    tmp_path: Path, earlier: tuple[int, ...]
) -> None:
    box = Box(tmp_path)
    box.link.counts = DesiredCounts(1, 1)
    await box.settle()
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), 78)
    await box.settle()
    for decision_id in (*earlier, 7):
        box.link.counts = DesiredCounts(1, 1, decision_id, 0)
        await box.settle()
        assert box.states()["ns_VllmWorker"] == "failed"
    box.link.counts = DesiredCounts(1, 1, 8, 0)
    await box.settle()
    assert box.states()["ns_VllmWorker"] == "ready"


async def test_while_the_disk_is_full_nothing_new_starts_but_crashed_workers_do(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.statefile.is_disk_full = True
    box.link.counts = DesiredCounts(1, 2, 1, 0)
    box.reconciler.record_exit(box.circus.end("ns_PrefillWorker"), -9)
    await box.settle()
    assert box.states() == dict.fromkeys(["ns_Frontend", "ns_VllmWorker", "ns_PrefillWorker"], "ready")
    assert sum("cannot be written" in line for line in box.said) == 1
    box.statefile.is_disk_full = False
    await box.settle()
    assert box.states()["ns_VllmWorker_1"] == "ready"
    assert {worker.name for worker in box.written} == set(box.reconciler.workers)


async def test_what_a_new_reconciler_finds_is_written_as_soon_as_the_disk_has_room(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.statefile.is_disk_full = True
    gone = box.written[-1]
    box.new_reconciler([replace(each, pid=each.pid + 1) if each == gone else each for each in box.written])
    await box.settle()
    assert gone in box.written
    box.statefile.is_disk_full = False
    await box.settle()
    assert {worker.pid for worker in box.written} == {
        worker.pid for worker in box.reconciler.workers.values()
    }
    assert gone not in box.written


async def test_gpus_of_others_are_never_given_out(tmp_path: Path) -> None:
    box = await Box(tmp_path, foreign=["GPU-SIM-0", "GPU-SIM-2"]).started(decode=2)
    assert box.reconciler.workers["ns_VllmWorker"].gpus == (1,)
    assert box.states()["ns_VllmWorker_1"] == "ready"
    assert "ns_PrefillWorker" not in box.states()
    assert sum("PrefillWorker: a worker waits for its GPUs" in line for line in box.said) == 1
    box.claims.others.clear()
    await box.settle()
    assert box.states()["ns_PrefillWorker"] == "ready"


@pytest.mark.parametrize("is_added", [False, True])
async def test_a_new_reconciler_finishes_a_start_that_was_begun(tmp_path: Path, is_added: bool) -> None:
    box = await Box(tmp_path).started()
    begun = Worker("ns_VllmWorker_1", "VllmWorker", Role.DECODE, gpus=(2,))
    box.written = (*box.written, begun)
    if is_added:
        await box.circus.add(begun.name, "", [], {"env": {}})
    box.link.counts = DesiredCounts(1, 2, 1, 0)
    before = dict(box.circus.pids)
    box.new_reconciler()
    await box.settle()
    assert box.states()["ns_VllmWorker_1"] == "ready"
    assert before.items() <= box.circus.pids.items()
    assert box.link.acknowledged[-1] == 1


async def test_a_new_reconciler_finishes_a_drain_that_was_begun(tmp_path: Path) -> None:
    box = await Box(tmp_path).started(decode=2)
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.reconciler.reconcile_once()
    box.link.revoked.clear()
    box.new_reconciler()
    await box.settle()
    assert len(box.link.revoked) == 1
    box.circus.end("ns_VllmWorker_1")
    await box.settle()
    box.now += 1
    await box.settle()
    assert "ns_VllmWorker_1" not in box.reconciler.workers


async def test_a_process_that_no_signal_ends_is_waited_for_without_spinning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await Box(tmp_path).started(decode=2)
    monkeypatch.setattr(box.processes, "kill_group", lambda pid, started_at: (pid,))
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.settle()
    assert box.states()["ns_VllmWorker_1"] == "draining"
    box.now += 60
    await box.settle()
    assert await box.reconciler.reconcile_once() > 0.1


async def test_an_exit_whose_code_nobody_saw_is_a_crash(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    box.circus.end("ns_VllmWorker")
    assert await box.reconciler.reconcile_once() <= 0.05
    assert box.states()["ns_VllmWorker"] == "starting"
    box.now += 1
    await box.settle()
    assert box.reconciler.workers["ns_VllmWorker"].restarts_s != ()


async def test_what_circus_cannot_start_is_tried_again_later(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.circus.can_start = False
    await box.started()
    assert {worker.state for worker in box.reconciler.workers.values()} == {WorkerState.BACKOFF}
    box.circus.can_start = True
    box.now += 5
    await box.settle()
    assert set(box.states().values()) == {"ready"}


async def test_it_learns_how_long_an_engine_takes_to_start_and_only_from_a_start(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.frozen = {"ns_VllmWorker"}
    await box.started()
    box.now += 40
    box.frozen.clear()
    await box.settle()
    assert box.startup_times.learnt == [('["sim", "some/model", 1]', 40.0)]
    await frozen(box, "ns_VllmWorker")
    box.frozen.clear()
    await box.settle()
    assert len(box.startup_times.learnt) == 1


async def test_the_files_of_a_worker_go_when_its_processes_are_gone_and_those_of_others_stay(
    tmp_path: Path,
) -> None:
    box = await Box(tmp_path).started()
    scratch = box.launch.scratch_dir
    scratch.mkdir()
    for name in ("ns_VllmWorker.slot", "ns_VllmWorker_1.slot", "ns_PrefillWorker.a.b", "other"):
        (scratch / name).touch()
    (scratch / "ns_VllmWorker.directory").mkdir()
    await box.settle()
    assert len(list(scratch.iterdir())) == 5
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), -9)
    await box.settle()
    assert {path.name for path in scratch.iterdir()} == {
        "ns_VllmWorker_1.slot",
        "ns_PrefillWorker.a.b",
        "other",
    }


async def test_a_worker_that_still_loads_may_not_hold_its_gpu_for_as_long_as_requests_may_take(
    tmp_path: Path,
) -> None:
    box = Box(tmp_path)
    object.__setattr__(box.launch, "leave_timeout_s", 600)
    box.frozen = {"ns_VllmWorker_1"}
    await box.started(decode=2)
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.settle()
    assert box.circus.signals == [("ns_VllmWorker_1", SIGTERM)]
    box.now += 13
    await box.settle()
    assert len(box.processes.killed) == 1


async def test_a_worker_is_not_ready_from_the_first_look_after_its_end_on(tmp_path: Path) -> None:
    box = await Box(tmp_path).started()
    before = box.reconciler.workers["ns_VllmWorker"]
    box.circus.end("ns_VllmWorker")
    await box.reconciler.reconcile_once()
    [written] = [each for each in box.written if each.name == before.name]
    assert (written.state.value, written.pid, written.gpus) == ("starting", before.pid, before.gpus)
    box.reconciler.record_exit(before.pid, -9)
    await box.settle()
    assert box.states()["ns_VllmWorker"] == "ready"
    assert len(box.reconciler.workers["ns_VllmWorker"].restarts_s) == 1


async def test_a_look_that_failed_accuses_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    box = await Box(tmp_path).started()

    def none_more(pid: int) -> int | None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(box.processes, "identify", none_more)
        with pytest.raises(OSError, match="Too many"):
            await box.reconciler.reconcile_once()
    before = box.reconciler.workers
    await box.settle()
    assert box.reconciler.workers == before
    assert set(box.states().values()) == {"ready"}


async def test_ends_are_noticed_while_a_pass_waits_for_circus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconciler, "RESYNC_S", 0.01)
    box = await Box(tmp_path).started()
    stands_still = asyncio.Event()

    async def pid_of(name: str) -> int:
        stands_still.set()
        await asyncio.Event().wait()
        raise ArbiterBusy("circus did not answer")

    monkeypatch.setattr(box.circus, "pid", pid_of)
    box.reconciler.record_exit(box.circus.end("ns_PrefillWorker"), -9)
    running = asyncio.create_task(box.reconciler.run())
    await asyncio.wait_for(stands_still.wait(), 30)
    box.circus.end("ns_VllmWorker")
    await eventually(
        lambda: "ready" not in [each.state.value for each in box.written if each.name == "ns_VllmWorker"]
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await eventually(lambda: asyncio.all_tasks() == {asyncio.current_task()})


def test_a_service_without_a_free_gpu_is_told_once_whatever_the_gigabytes_do() -> None:
    waits = PendingWorkers()
    (line,) = waits.update({"VllmWorker": "GPU 1: 70 of 80 GiB in use by pid 1"}, {}, 100.0)
    assert line == "VllmWorker: a worker waits for its GPUs: GPU 1: 70 of 80 GiB in use by pid 1"
    assert waits.update({"VllmWorker": "GPU 1: 60 of 80 GiB in use by pid 1"}, {}, 101.0) == []
    assert waits.reasons == {"VllmWorker": "GPU 1: 60 of 80 GiB in use by pid 1"}
    assert len(waits.update({"VllmWorker": "GPU 1: 60 of 80 GiB in use by pid 2"}, {}, 102.0)) == 1
    assert waits.update({}, {}, 103.0) == []
    assert len(waits.update({"VllmWorker": "GPU 1: 60 of 80 GiB in use by pid 2"}, {}, 104.0)) == 1


def test_a_worker_whose_own_gpu_is_not_free_yet_is_told_when_that_takes_long() -> None:
    waits, why = PendingWorkers(), "GPU 1: 70 of 80 GiB in use by pid 1"
    assert waits.update({}, {"ns_VllmWorker": why}, 100.0) == []
    assert waits.reasons == {"ns_VllmWorker": why}
    assert waits.update({}, {"ns_VllmWorker": "GPU 1: 70 of 80 GiB in use by pid 2"}, 105.0) == []
    assert waits.update({}, {"ns_VllmWorker": why}, 100.0 + REPORT_AFTER_S) == [f"ns_VllmWorker waits: {why}"]
    assert waits.update({}, {"ns_VllmWorker": why}, 101.0 + REPORT_AFTER_S) == []


def test_a_gpu_that_is_only_looked_at_is_no_news() -> None:
    assert PendingWorkers().update({"VllmWorker": f"GPU 1: {NOT_READ}"}, {}, 100.0) == []
