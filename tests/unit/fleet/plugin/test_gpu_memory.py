"""When a GPU is really free: seen empty after its last worker, and in use by nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping

from dynaplan.contract.gpus import UNREADABLE, Gpu, GpuUse
from dynaplan.fleet.plugin import gpu_availability
from dynaplan.fleet.plugin.gpu_availability import NOT_READ, GpuMemory
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.util.amounts import GIB
from tests.fakes.polling import eventually

GPUS = tuple(Gpu(index, f"GPU-SIM-{index}", "simulated", 80 * GIB) for index in range(2))


class Driver:
    """A driver whose memory the test fills, and which it can let hang."""

    def __init__(self) -> None:
        self.used_gb = {0: 0, 1: 0}
        self.now = 100.0
        self.is_free = threading.Event()
        self.is_free.set()
        self.wake = asyncio.Event()
        self.memory = GpuMemory(GPUS, self.read, self, self.wake)

    def read(self) -> Mapping[int, GpuUse]:
        self.is_free.wait(10)
        return {index: GpuUse(used * GIB) for index, used in self.used_gb.items()}

    def now_s(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def worker(*gpus: int, pid: int = 0) -> Worker:
    return Worker("ns_VllmWorker", "VllmWorker", Role.DECODE, gpus=gpus, pid=pid)


async def test_nothing_is_free_before_it_was_looked_at() -> None:
    driver = Driver()
    assert driver.memory.busy(()) == {0: NOT_READ, 1: NOT_READ}
    await driver.memory.read_once()
    assert driver.wake.is_set()
    assert driver.memory.busy(()) == {}


async def test_what_others_use_is_busy_and_what_a_worker_of_ours_uses_is_not() -> None:
    driver = Driver()
    driver.used_gb = {0: 70, 1: 71}
    await driver.memory.read_once()
    assert driver.memory.busy((worker(0, pid=7),)) == {
        1: "71 of 80 GiB in use by a process that cannot be seen from here"
    }


async def test_a_gpu_is_free_only_when_it_was_seen_empty_after_its_worker_ended() -> None:
    driver = Driver()
    await driver.memory.read_once()
    driver.now = 101.0
    assert driver.memory.busy((worker(0, pid=7),)) == {}
    assert driver.memory.busy(()) == {0: NOT_READ}
    driver.used_gb[0] = 70
    driver.now = 102.0
    await driver.memory.read_once()
    assert "70 of 80 GiB" in driver.memory.busy(())[0]
    assert driver.memory.is_being_freed(0)
    assert not driver.memory.is_being_freed(1)
    driver.used_gb[0] = 0
    driver.now = 103.0
    await driver.memory.read_once()
    assert driver.memory.busy(()) == {}
    driver.now = 101.0 + gpu_availability.BEING_FREED_S
    assert not driver.memory.is_being_freed(0)


async def test_a_gpu_that_cannot_be_read_is_not_handed_on_and_the_others_are() -> None:
    driver = Driver()
    assert driver.memory.busy((worker(0, 1, pid=7),)) == {}
    del driver.used_gb[0]
    driver.now = 101.0
    await driver.memory.read_once()
    assert driver.memory.busy(()) == {0: UNREADABLE}
    assert driver.memory.shared_uses(()) == {0: UNREADABLE, 1: GpuUse()}
    driver.now += gpu_availability.DRIVER_TIMEOUT_S
    assert driver.memory.busy(()) == {0: UNREADABLE}
    driver.used_gb[0] = 0
    await driver.memory.read_once()
    assert driver.memory.busy(()) == {}


async def test_a_read_without_any_gpu_is_no_answer() -> None:
    driver = Driver()
    driver.memory.busy((worker(0, pid=7),))
    driver.used_gb = {}
    driver.now = 101.0
    await driver.memory.read_once()
    assert driver.memory.busy(()) == {0: NOT_READ, 1: NOT_READ}
    driver.now += gpu_availability.DRIVER_TIMEOUT_S
    assert driver.memory.busy(()) == {}


async def test_it_looks_at_once_when_somebody_waits_and_wakes_on_a_change() -> None:
    driver = Driver()
    task = asyncio.create_task(driver.memory.run())
    try:
        await eventually(lambda: driver.memory.busy(()) == {})
        driver.wake.clear()
        driver.now = 101.0
        driver.memory.busy((worker(0, pid=7),))
        driver.now = 101.5
        await eventually(lambda: driver.memory.busy(()) == {}, 0.9)
        driver.wake.clear()
        driver.used_gb[1] = 60
        await asyncio.wait_for(driver.wake.wait(), 10)
        assert list(driver.memory.busy(())) == [1]
    finally:
        task.cancel()


async def test_a_driver_that_hangs_holds_nothing_up_for_ever() -> None:
    driver = Driver()
    driver.is_free.clear()
    task = asyncio.create_task(driver.memory.read_once())
    await asyncio.sleep(0)
    assert set(driver.memory.busy(())) == {0, 1}
    driver.now += gpu_availability.DRIVER_TIMEOUT_S
    assert driver.memory.busy(()) == driver.memory.busy(()) == {}
    driver.is_free.set()
    await task
