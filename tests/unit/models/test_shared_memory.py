"""The memory that several models share: ours, foreign, and what a worker leaves behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dynaplan.contract.gpus import BEING_FREED_S, NOT_READ, UNREADABLE, Gpu, GpuUse
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.models.model import HOST, Device
from dynaplan.models.shared_memory import HostMemory, SharedMemory

GIB = 2**30
GPU = Gpu(0, "GPU-0", memory_bytes=80 * GIB)
ALPHA = Worker("ns_a", "a", Role.DECODE, WorkerState.READY, gpus=(0,), memory_bytes=50 * GIB, pid=7)
BETA = Worker("ns_b", "b", Role.DECODE, WorkerState.READY, pid=8)


HOST_MEMORY = HostMemory(16 * GIB, 10 * GIB, {BETA.pid: 3 * GIB}, own_bytes=2 * GIB)


class Box:
    """One GPU, pass by pass."""

    def __init__(self, budget_bytes: int = 0) -> None:
        self.memory = SharedMemory()
        self.budget_bytes = budget_bytes

    def device(
        self,
        workers: Sequence[Worker],
        used: int,
        now_s: float = 0.0,
        why: str = "",
        by_driver: Sequence[str] = (),
        kept: Mapping[str, int] | None = None,
    ) -> Device:
        self.memory = self.memory.follow(
            workers,
            [(GPU, GpuUse(used * GIB), why)],
            None,
            now_s,
            kept_bytes=kept,
            by_driver=by_driver,
            budget_bytes=self.budget_bytes,
        )
        (found,) = self.memory.devices
        return found

    def held(self, worker: Worker | None) -> Mapping[int, int]:
        return self.memory.held(worker, "a")


def test_what_the_driver_says_beyond_our_workers_is_foreign() -> None:
    box = Box()
    assert box.device([], 30).foreign_bytes == 30 * GIB
    assert box.device([ALPHA], 62).foreign_bytes == 12 * GIB
    assert box.device([ALPHA], 20).foreign_bytes == 0, "a load has not taken all of it yet"


def test_a_worker_that_loads_does_not_hide_what_others_hold() -> None:
    box = Box()
    loading = replace(ALPHA, state=WorkerState.STARTING)
    assert box.device([], 10).foreign_bytes == 10 * GIB
    assert box.device([loading], 12).foreign_bytes == 10 * GIB
    assert box.device([loading], 62).foreign_bytes == 12 * GIB
    assert box.device([ALPHA], 50).foreign_bytes == 0


def test_a_worker_that_has_gone_holds_its_memory_until_it_is_seen_free() -> None:
    box = Box()
    box.device([ALPHA], 60)
    assert box.device([], 60, why=NOT_READ) == Device(0, 80 * GIB, 10 * GIB), "waited with, not unusable"
    assert box.held(None) == {0: 50 * GIB}
    assert box.device([], 30).foreign_bytes == 10 * GIB
    assert box.held(None) == {0: 20 * GIB}
    box.device([], 10)
    assert box.held(None) == {}


def test_a_gpu_that_cannot_be_read_is_not_seen_free_and_gets_no_model() -> None:
    box = Box()
    box.device([ALPHA], 60)
    assert box.device([], 0, why=UNREADABLE) == Device(0, 80 * GIB, 10 * GIB, UNREADABLE)
    assert box.held(None) == {0: 50 * GIB}


def test_memory_that_never_comes_back_is_foreign_after_a_while() -> None:
    box = Box()
    box.device([ALPHA], 50)
    box.device([], 50, now_s=1.0)
    assert box.held(None) == {0: 50 * GIB}
    assert box.device([], 50, now_s=2.0 + BEING_FREED_S).foreign_bytes == 50 * GIB
    assert box.held(None) == {}


def test_a_reason_other_than_an_unread_gpu_keeps_models_off_it() -> None:
    assert Box().device([], 0, why="reserved by alice").unusable == "reserved by alice"


def test_of_the_host_foreign_is_what_is_not_available_and_no_worker_has() -> None:
    memory = SharedMemory().follow([BETA], [], HOST_MEMORY, 0.0)
    assert memory.devices == (Device(HOST, 16 * GIB, 4 * GIB),)
    assert memory.held(BETA, "b") == {HOST: 3 * GIB}


def test_saved_kv_entries_are_not_foreign() -> None:
    memory = SharedMemory().follow([BETA], [], replace(HOST_MEMORY, saved_bytes=3 * GIB), 0.0)
    assert memory.devices == (Device(HOST, 16 * GIB, 1 * GIB),)


def test_a_command_holds_what_the_driver_says_after_its_load_beyond_what_it_said_before() -> None:
    box = Box()
    ready = replace(ALPHA, since_s=20.0)

    def held(worker: Worker, used: int, now_s: float, *others: Worker) -> dict[int, int]:
        box.device([worker, *others], used, now_s, by_driver=["a"])
        return dict(box.held(worker))

    box.device([], 1, 9.0)
    assert held(replace(ALPHA, state=WorkerState.STARTING), 3, 10.0) == {}
    assert held(ready, 9, 20.0) == {0: 8 * GIB}
    assert held(ready, 13, 21.0) == {0: 12 * GIB}
    assert held(ready, 40, 60.0) == {0: 12 * GIB}, "a foreign program, long after"


def test_what_a_command_holds_is_not_told_from_that_of_another_that_loads_beside_it() -> None:
    box = Box()
    loading = replace(ALPHA, state=WorkerState.STARTING, memory_bytes=20 * GIB)
    beside = replace(loading, name="ns_c", component="c", pid=9)
    for workers, used in (([loading], 0), ([loading, beside], 5), ([replace(ALPHA, since_s=3.0), beside], 9)):
        box.device(workers, used, 3.0, by_driver=["a", "c"])
    assert box.held(ALPHA) == {}


def test_a_budget_bounds_each_device_and_others_take_the_rest_first() -> None:
    box = Box(40 * GIB)
    assert box.device([], 30) == Device(0, 40 * GIB, 0)
    assert box.device([], 50) == Device(0, 40 * GIB, 10 * GIB)


def test_a_sleeper_holds_what_it_keeps_and_what_has_not_come_back() -> None:
    box = Box()
    box.device([ALPHA], 60)
    kept = {ALPHA.name: 2 * GIB}

    def asleep(used: int) -> int:
        return box.device([ALPHA], used, 1.0, kept=kept).foreign_bytes // GIB

    assert asleep(60) == 10
    assert box.held(ALPHA) == {0: 50 * GIB}
    assert asleep(32) == 10
    assert box.held(ALPHA) == {0: 22 * GIB}
    assert box.held(None) == {}, "it is the sleeper's, and counted once"
    assert asleep(12) == 10
    assert box.held(ALPHA) == {}
    assert box.device([ALPHA], 60).foreign_bytes == 10 * GIB, "it is awake"


def test_what_two_workers_of_a_model_left_behind_is_counted_together_and_one_that_stays_is_not() -> None:
    box = Box()
    small = replace(ALPHA, memory_bytes=20 * GIB)
    workers = [replace(small, name=name) for name in ("ns_a", "ns_a_1", "ns_a_2")]
    box.device(workers, 60)
    assert box.device(workers[:1], 60).foreign_bytes == 0
    assert box.held(None) == {0: 40 * GIB}
    box.device(workers[:1], 20)
    assert box.held(None) == {}


def test_a_worker_that_failed_holds_nothing_and_what_it_left_behind_is_its_models() -> None:
    box = Box()
    box.device([ALPHA], 60)
    failed = replace(ALPHA, state=WorkerState.FAILED, gpus=(), memory_bytes=0, pid=0)
    box.device([failed], 60)
    assert box.held(failed) == {}
    assert box.held(None) == {0: 50 * GIB}
