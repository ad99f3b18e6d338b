"""The memory that several models share: ours, foreign, and what a worker leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynaplan.contract.gpus import UNREADABLE, Gpu, GpuUse
from dynaplan.engines.llamacpp.saved_slots import SavedSlot, saved_in
from dynaplan.fleet.plugin.gpu_availability import BEING_FREED_S, NOT_READ
from dynaplan.fleet.plugin.shared_memory import HostMemory, SharedMemory
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.models.model import HOST, Device
from dynaplan.process.memory import BoxMemory
from dynaplan.process.worker_memory import HeldMemory

GIB = 2**30
GPU = Gpu(0, "GPU-0", memory_bytes=80 * GIB)
ALPHA = Worker("ns_a", "a", Role.DECODE, WorkerState.READY, gpus=(0,), memory_bytes=50 * GIB, pid=7)
BETA = Worker("ns_b", "b", Role.DECODE, WorkerState.READY, pid=8)


def host(pids: Sequence[int]) -> HostMemory:
    return HostMemory(BoxMemory(16 * GIB, 10 * GIB), {pid: HeldMemory(3 * GIB, 2 * GIB) for pid in pids})


def device(
    memory: SharedMemory, workers: Sequence[Worker], used: int, now_s: float = 0.0, why: str = ""
) -> Device:
    (found,) = memory.follow(workers, [(GPU, GpuUse(used * GIB), why)], has_host=False, now_s=now_s)
    return found


def test_what_the_driver_says_beyond_our_workers_is_foreign() -> None:
    memory = SharedMemory(host)
    assert device(memory, [], 30).foreign_bytes == 30 * GIB
    assert device(memory, [ALPHA], 62).foreign_bytes == 12 * GIB
    assert device(memory, [ALPHA], 20).foreign_bytes == 0, "a load has not taken all of it yet"


def test_a_worker_that_loads_does_not_hide_what_others_hold() -> None:
    memory = SharedMemory(host)
    loading = replace(ALPHA, state=WorkerState.STARTING)
    assert device(memory, [], 10).foreign_bytes == 10 * GIB
    assert device(memory, [loading], 12).foreign_bytes == 10 * GIB
    assert device(memory, [loading], 62).foreign_bytes == 12 * GIB
    assert device(memory, [ALPHA], 50).foreign_bytes == 0


def test_a_worker_that_has_gone_holds_its_memory_until_it_is_seen_free() -> None:
    memory = SharedMemory(host)
    device(memory, [ALPHA], 60)
    assert device(memory, [], 60, why=NOT_READ) == Device(0, 80 * GIB, 10 * GIB), "waited with, not unusable"
    assert memory.held(None, "a") == {0: 50 * GIB}
    assert device(memory, [], 30).foreign_bytes == 10 * GIB
    assert memory.held(None, "a") == {0: 20 * GIB}
    device(memory, [], 10)
    assert memory.held(None, "a") == {}


def test_a_gpu_that_cannot_be_read_is_not_seen_free_and_gets_no_model() -> None:
    memory = SharedMemory(host)
    device(memory, [ALPHA], 60)
    assert device(memory, [], 0, why=UNREADABLE) == Device(0, 80 * GIB, 10 * GIB, UNREADABLE)
    assert memory.held(None, "a") == {0: 50 * GIB}


def test_memory_that_never_comes_back_is_foreign_after_a_while() -> None:
    memory = SharedMemory(host)
    device(memory, [ALPHA], 50)
    device(memory, [], 50, now_s=1.0)
    assert memory.held(None, "a") == {0: 50 * GIB}
    assert device(memory, [], 50, now_s=2.0 + BEING_FREED_S).foreign_bytes == 50 * GIB
    assert memory.held(None, "a") == {}


def test_a_reason_other_than_an_unread_gpu_keeps_models_off_it() -> None:
    assert device(SharedMemory(host), [], 0, why="reserved by alice").unusable == "reserved by alice"


def test_of_the_host_foreign_is_what_is_not_available_and_no_worker_has() -> None:
    memory = SharedMemory(host)
    (found,) = memory.follow([BETA], [], has_host=True, now_s=0.0)
    assert found == Device(HOST, 16 * GIB, 4 * GIB)
    assert memory.held(BETA, "b") == {HOST: 3 * GIB}
    assert memory.measure(BETA) == 3 * GIB


def test_a_worker_that_has_become_ready_is_not_shown_with_the_memory_of_its_load() -> None:
    held = {BETA.pid: HeldMemory(GIB, GIB)}
    memory = SharedMemory(lambda pids: HostMemory(host(pids).box, dict(held)))
    memory.follow([BETA], [], has_host=True, now_s=0.0)
    held[BETA.pid] = HeldMemory(5 * GIB, 5 * GIB)
    memory.measure(BETA)
    memory.follow([BETA], [], has_host=True, now_s=0.1)
    assert memory.held(BETA, "b") == {HOST: 5 * GIB}


def test_a_command_holds_what_the_driver_says_after_its_load_beyond_what_it_said_before() -> None:
    memory = SharedMemory(host)
    ready = replace(ALPHA, since_s=20.0)

    def held(worker: Worker, used: int, now_s: float, *others: Worker) -> dict[int, int]:
        uses = [(GPU, GpuUse(used * GIB), "")]
        memory.follow([worker, *others], uses, has_host=False, now_s=now_s, by_driver=["a"])
        return dict(memory.held(worker, "a"))

    memory.follow([], [(GPU, GpuUse(1 * GIB), "")], has_host=False, now_s=9.0)
    assert held(replace(ALPHA, state=WorkerState.STARTING), 3, 10.0) == {}
    assert held(ready, 9, 20.0) == {0: 8 * GIB}
    assert held(ready, 13, 21.0) == {0: 12 * GIB}
    assert memory.measure(ready) == 12 * GIB
    assert held(ready, 40, 60.0) == {0: 12 * GIB}, "a foreign program, long after"


def test_what_a_command_holds_is_not_told_from_that_of_another_that_loads_beside_it() -> None:
    memory = SharedMemory(host)
    loading = replace(ALPHA, state=WorkerState.STARTING, memory_bytes=20 * GIB)
    beside = replace(loading, name="ns_c", component="c", pid=9)
    for workers, used in (([loading], 0), ([loading, beside], 5), ([replace(ALPHA, since_s=3.0), beside], 9)):
        uses = [(GPU, GpuUse(used * GIB), "")]
        memory.follow(workers, uses, has_host=False, now_s=3.0, by_driver=["a", "c"])
    assert memory.held(ALPHA, "a") == {}


def test_a_budget_bounds_each_device_and_others_take_the_rest_first() -> None:
    memory = SharedMemory(host, 40 * GIB)
    assert device(memory, [], 30) == Device(0, 40 * GIB, 0)
    assert device(memory, [], 50) == Device(0, 40 * GIB, 10 * GIB)


def test_saved_kv_entries_are_not_foreign_and_the_oldest_go_for_a_load_its_own_last(tmp_path: Path) -> None:
    for age, model in enumerate(("own", "old", "new")):
        (tmp_path / SavedSlot(age, "0" * 16, 100, GIB, model).file_name).touch()
    memory = SharedMemory(host, saved_directory=tmp_path)
    (found,) = memory.follow([BETA], [], has_host=True, now_s=0.0)
    assert found.foreign_bytes == 1 * GIB, "4 without what is saved"
    assert memory.make_room_on_host("own", 10 * GIB) == 0, "so much is available"
    assert memory.make_room_on_host("own", 11 * GIB) == 1 * GIB
    assert [each.model for each in saved_in(tmp_path)] == ["new", "own"]
    assert memory.make_room_on_host("own", 13 * GIB) == 2 * GIB
    assert saved_in(tmp_path) == []


def test_a_sleeper_holds_what_it_keeps_and_what_has_not_come_back() -> None:
    memory = SharedMemory(host)
    device(memory, [ALPHA], 60)
    kept = {ALPHA.name: 2 * GIB}

    def asleep(used: int) -> int:
        (found,) = memory.follow(
            [ALPHA], [(GPU, GpuUse(used * GIB), "")], has_host=False, now_s=1.0, kept_bytes=kept
        )
        return found.foreign_bytes // GIB

    assert asleep(60) == 10
    assert memory.held(ALPHA, "a") == {0: 50 * GIB}
    assert asleep(32) == 10
    assert memory.held(ALPHA, "a") == {0: 22 * GIB}
    assert memory.held(None, "a") == {}, "it is the sleeper's, and counted once"
    assert asleep(12) == 10
    assert memory.held(ALPHA, "a") == {}
    assert device(memory, [ALPHA], 60).foreign_bytes == 10 * GIB, "it is awake"


def test_what_two_workers_of_a_model_left_behind_is_counted_together_and_one_that_stays_is_not() -> None:
    memory = SharedMemory(host)
    small = replace(ALPHA, memory_bytes=20 * GIB)
    workers = [replace(small, name=name) for name in ("ns_a", "ns_a_1", "ns_a_2")]
    device(memory, workers, 60)
    assert device(memory, workers[:1], 60).foreign_bytes == 0
    assert memory.held(None, "a") == {0: 40 * GIB}
    device(memory, workers[:1], 20)
    assert memory.held(None, "a") == {}


def test_a_worker_that_failed_holds_nothing_and_what_it_left_behind_is_its_models() -> None:
    memory = SharedMemory(host)
    device(memory, [ALPHA], 60)
    failed = replace(ALPHA, state=WorkerState.FAILED, gpus=(), memory_bytes=0, pid=0)
    device(memory, [failed], 60)
    assert memory.held(failed, "a") == {}
    assert memory.held(None, "a") == {0: 50 * GIB}
