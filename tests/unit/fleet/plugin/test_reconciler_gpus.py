"""GPUs whose memory is in use, as the reconciler treats them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dynaplan.contract.gpus import GpuProcess, GpuUse
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.fleet.plugin.gpu_availability import GpuMemory
from dynaplan.util.amounts import GIB
from dynaplan.util.errors import DeploymentError
from tests.unit.fleet.plugin.box import Box

OTHERS = GpuUse(71 * GIB, (GpuProcess(4711, "python", 1001),))
IN_USE = "71 of 80 GiB in use by pid 4711 (python, uid 1001)"


class FillableBox(Box):
    """A box whose GPUs the test fills; each pass is preceded by a look at the memory."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        gpus = tuple(replace(gpu, memory_bytes=80 * GIB) for gpu in self.launch.gpus)
        self.launch = replace(self.launch, gpus=gpus)
        self.uses: dict[int, GpuUse] = {}
        self.memory = GpuMemory(gpus, self.read_gpus, self, self.wake)
        self.new_reconciler()

    def read_gpus(self) -> dict[int, GpuUse]:
        return {gpu.index: self.uses.get(gpu.index, GpuUse()) for gpu in self.launch.gpus}

    async def settle(self, passes: int = 4) -> None:
        for _ in range(passes):
            self.now += 1
            assert self.memory
            await self.memory.read_once()
            await super().settle(1)


async def test_gpus_that_others_use_are_passed_over_and_not_planned_with(tmp_path: Path) -> None:
    box = FillableBox(tmp_path)
    box.uses = {0: OTHERS, 2: OTHERS}
    await box.started()
    assert {worker.gpus for worker in box.reconciler.workers.values()} == {(), (1,), (3,)}
    assert box.link.fleet["gpus_total"] == 2
    assert box.link.fleet["gpus_left_out"] == [f"GPU 0,2: {IN_USE}"]
    box.link.counts = DesiredCounts(1, 2, 1, 0)
    await box.settle()
    assert f"GPU 0,2: {IN_USE}" in box.link.fleet["waiting"]["VllmWorker"]
    assert [line for line in box.said if "VllmWorker: a worker waits" in line and IN_USE in line]
    box.uses = {}
    await box.settle()
    assert box.states()["ns_VllmWorker_1"] == "ready"
    assert (box.link.fleet["gpus_total"], box.link.fleet["waiting"]) == (4, {})


async def test_claims_that_cannot_be_used_are_what_a_worker_is_said_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    box = await FillableBox(tmp_path).started()

    def claim(uuids: Iterable[str]) -> set[str]:
        raise DeploymentError("cannot use the claims in /tmp/x: No space left on device", hint="Free some.")

    monkeypatch.setattr(box.claims, "claim", claim)
    box.link.counts = DesiredCounts(1, 2, 1, 0)
    await box.settle()
    assert "/tmp/x: No space left on device" in box.link.fleet["waiting"]["VllmWorker"]


async def test_a_crashed_worker_starts_again_when_the_memory_of_its_last_process_is_free(
    tmp_path: Path,
) -> None:
    box = await FillableBox(tmp_path).started()
    (gpu,) = box.reconciler.workers["ns_VllmWorker"].gpus
    box.uses = {gpu: GpuUse(70 * GIB)}
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), -9)
    await box.settle()
    assert (box.states()["ns_VllmWorker"], box.reconciler.workers["ns_VllmWorker"].pid) == ("starting", 0)
    assert "70 of 80 GiB" in box.link.fleet["waiting"]["ns_VllmWorker"]
    assert box.link.fleet["gpus_total"] == 4, "its own memory is about to be free"
    assert not any("waits" in line for line in box.said)
    box.uses |= dict.fromkeys((2, 3), OTHERS)
    await box.settle(10)
    assert any(line.startswith("ns_VllmWorker waits: GPU 0: 70 of 80 GiB") for line in box.said)
    assert await box.reconciler.reconcile_once() > 0.1, "it waits without spinning"
    box.uses = {}
    await box.settle()
    assert box.states()["ns_VllmWorker"] == "ready"
    assert box.link.fleet["waiting"] == {}


async def test_a_worker_whose_gpu_somebody_else_has_taken_moves_to_a_free_one_after_a_while(
    tmp_path: Path,
) -> None:
    box = await FillableBox(tmp_path).started()
    box.uses = {0: OTHERS}
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker"), -9)
    await box.settle()
    assert box.reconciler.workers["ns_VllmWorker"].gpus == (0,)
    await box.settle(12)
    moved = box.reconciler.workers["ns_VllmWorker"]
    assert (moved.gpus, moved.state.value) == ((2,), "ready")
    assert box.circus.environments["ns_VllmWorker"]["CUDA_VISIBLE_DEVICES"] == "GPU-SIM-2"
    assert box.claims.held == {"GPU-SIM-1", "GPU-SIM-2"}


async def test_a_worker_that_waits_for_its_gpu_and_is_not_wanted_any_more_is_gone_at_once(
    tmp_path: Path,
) -> None:
    box = await FillableBox(tmp_path).started(decode=2)
    (gpu,) = box.reconciler.workers["ns_VllmWorker_1"].gpus
    box.uses = {gpu: OTHERS}
    box.reconciler.record_exit(box.circus.end("ns_VllmWorker_1"), -9)
    await box.settle()
    box.link.counts = DesiredCounts(1, 1, 1, 0)
    await box.settle()
    assert "ns_VllmWorker_1" not in box.reconciler.workers
    assert f"GPU-SIM-{gpu}" not in box.claims.held


async def test_a_new_reconciler_finds_the_processes_of_its_workers_however_full_their_gpus_are(
    tmp_path: Path,
) -> None:
    box = await FillableBox(tmp_path).started()
    box.written = tuple(replace(worker, pid=0, started_at=0) for worker in box.written)
    box.written = tuple(
        replace(worker, state=type(worker.state).STARTING, url="", instance_id=0) for worker in box.written
    )
    box.uses = {0: OTHERS, 1: OTHERS}
    pids = dict(box.circus.pids)
    box.new_reconciler()
    await box.settle()
    assert box.circus.pids == pids
    assert set(box.states().values()) == {"ready"}
