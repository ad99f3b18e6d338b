"""The memory of GPUs in use: through a stand-in for the driver, and from the files of simulated GPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.contract.gpus import Gpu, GpuActivity, GpuHealth, GpuProcess, GpuUse, PowerLimit
from dynaplan.fleet.gpu_devices import (
    NvmlUses,
    activity_reader,
    busy_now,
    health_reader,
    nvml,
    power_limits,
    process_of,
    simulated,
    simulated_uses,
)

GPUS = (Gpu(0, "GPU-a", "H100", 80), Gpu(1, "MIG-b", "H100", 40), Gpu(2, "GPU-c", "GB10", 0))


class FakeNvmlError(Exception):
    """``pynvml.NVMLError``."""


class FakeLost(FakeNvmlError):
    """``pynvml.NVMLError_GpuIsLost``."""


class FakeTimeout(FakeNvmlError):
    """``pynvml.NVMLError_Timeout``: no event is there."""


class FakeDriver:
    """The part of pynvml that is asked for memory, processes and activity.

    Copies: every call but ``nvmlInit`` fails before it; a GPU that shares the machine's memory raises
    NVMLError_NotSupported; a process of another container has the pid 0 or is not told; ``usedGpuMemory`` is
    None where it is not known, as in MIG mode without permission; a MIG slice has no utilisation and no power
    of its own; a GPU that is ``lost`` fails in every call; without a driver all calls fail; only root sets a
    power limit, in milliwatts.
    """

    NVMLError, NVMLError_GpuIsLost, NVMLError_Timeout = FakeNvmlError, FakeLost, FakeTimeout
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = NVML_CLOCK_SM = nvmlEventTypeXidCriticalError = 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = nvmlClocksThrottleReasonGpuIdle = 1

    def __init__(self) -> None:
        self.opened = 0
        self.has_driver = self.is_root = True
        self.limit_mw = 700_000
        self.lost = ""
        self.xids: list[tuple[str, int]] = []
        self.computing: list[tuple[int, int | None]] = []
        self.drawing: list[tuple[int, int | None]] = []

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise FakeNvmlError("Driver Not Loaded")
        self.opened += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if not self.opened or not self.has_driver:
            raise FakeNvmlError("Uninitialized")
        if uuid == self.lost:
            raise FakeLost("GPU is lost")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        if handle == "GPU-c":
            raise FakeNvmlError("Not Supported")
        return SimpleNamespace(total=80, used=71 if handle == "GPU-a" else 3)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")
        return 641_700

    def nvmlDeviceGetPowerManagementLimit(self, handle: str) -> int:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")
        return self.limit_mw

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: str) -> list[int]:
        return [200_000, 700_000]

    def nvmlDeviceSetPowerManagementLimit(self, handle: str, limit_mw: int) -> None:
        if not self.is_root:
            raise FakeNvmlError("Insufficient Permissions")
        self.limit_mw = limit_mw

    NVML_TEMPERATURE_GPU = 0

    def nvmlEventSetCreate(self) -> object:
        return self

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: object) -> None:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise FakeTimeout
        device, xid = self.xids.pop(0)
        return SimpleNamespace(device=device, eventData=xid)

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return handle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 1  # idle

    def nvmlDeviceGetTotalEccErrors(self, handle: str, kind: int, since: int) -> int:
        return 2

    def nvmlDeviceGetRemappedRows(self, handle: str) -> tuple[int, int, int, int]:
        return (0, 9, 1, 1)

    def nvmlDeviceGetTemperatureThreshold(self, handle: str, kind: int) -> int:
        return 87

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")
        return 345

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")
        return 1980

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        if handle == "MIG-b":
            raise FakeNvmlError("Not Supported")
        return 61

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        if handle == "MIG-b":
            raise FakeNvmlError("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.computing]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.drawing]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_the_memory_is_read_with_the_processes_that_hold_most_of_it_first(driver: FakeDriver) -> None:
    own = process_of(os.getpid())
    driver.computing = [(2**22 + 1, 5), (os.getpid(), 60), (0, None)]
    driver.drawing = [(os.getpid(), 1)]
    uses = NvmlUses().of(GPUS)
    assert uses[0] == GpuUse(71, (own, GpuProcess(2**22 + 1), GpuProcess(0)))
    assert own == GpuProcess(os.getpid(), psutil.Process().name(), os.getuid())


def test_a_gpu_without_memory_of_its_own_is_left_out_and_unseen_processes_are_none(
    driver: FakeDriver,
) -> None:
    assert NvmlUses().of(GPUS) == {0: GpuUse(71), 1: GpuUse(3)}


def test_a_driver_that_fails_tells_nothing_and_is_opened_anew(driver: FakeDriver) -> None:
    uses = NvmlUses()
    assert len(uses.of(GPUS)) == len(uses.of(GPUS)) == 2
    assert driver.opened == 1
    driver.has_driver = False
    assert uses.of(GPUS) == {}
    driver.has_driver = True
    assert len(uses.of(GPUS)) == 2
    assert driver.opened == 2


def test_a_lost_gpu_is_left_out_and_the_others_are_read(driver: FakeDriver) -> None:
    driver.lost = "GPU-a"
    uses = NvmlUses()
    assert uses.of(GPUS) == {1: GpuUse(3)}
    assert uses.activity_of(GPUS[:2]) == {1: GpuActivity()}
    assert driver.opened == 1


def test_a_simulated_gpu_is_filled_and_emptied_by_hand(tmp_path: Path) -> None:
    gpus = simulated(3)
    assert simulated_uses(gpus, tmp_path) == dict.fromkeys(range(3), GpuUse())
    file = tmp_path / "gpu-2.json"
    file.write_text(json.dumps({"used_bytes": 71 * 2**30, "pids": [os.getpid()]}))
    assert simulated_uses(gpus, tmp_path)[2] == GpuUse(71 * 2**30, (process_of(os.getpid()),))
    file.unlink()
    assert simulated_uses(gpus, tmp_path)[2] == GpuUse()


def test_what_is_no_plain_file_is_an_empty_gpu(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gpu-0.json")
    (tmp_path / "gpu-1.json").mkdir()
    (tmp_path / "other").write_text('{"used_bytes": 5}')
    (tmp_path / "gpu-2.json").symlink_to(tmp_path / "other")
    assert simulated_uses(simulated(3), tmp_path) == dict.fromkeys(range(3), GpuUse())


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(VALUES | st.fixed_dictionaries({"used_bytes": VALUES, "pids": VALUES | st.lists(VALUES)}))
def test_whatever_stands_in_the_file_raises_nothing(
    tmp_path_factory: pytest.TempPathFactory, document: Any
) -> None:
    directory = tmp_path_factory.getbasetemp()
    (directory / "gpu-0.json").write_text(json.dumps(document))
    for use in simulated_uses(simulated(1), directory).values():
        assert 0 <= use.used_bytes < 2**63


def test_the_busy_ones_are_the_ones_whose_memory_is_in_use(driver: FakeDriver) -> None:
    full = Gpu(0, "GPU-a", "H100", 80 * 2**30)
    assert busy_now([full]) == set()
    driver.nvmlDeviceGetMemoryInfo = lambda _: SimpleNamespace(used=71 * 2**30)  # type: ignore[method-assign]
    assert busy_now([full]) == {0}


@pytest.mark.gpu
def test_the_real_gpus_tell_their_use() -> None:
    gpus = nvml()
    if not gpus:
        pytest.skip("no NVIDIA GPU here")
    uses = NvmlUses().of(gpus)
    assert uses.keys() == {gpu.index for gpu in gpus if gpu.memory_bytes}
    assert all(0 <= uses[gpu.index].used_bytes <= gpu.memory_bytes for gpu in gpus if gpu.index in uses)


def test_the_activity_is_read_and_what_a_slice_does_not_tell_is_none(driver: FakeDriver) -> None:
    assert NvmlUses().activity_of(GPUS[:2]) == {0: GpuActivity(0.97, 641.7, 61.0, 700.0), 1: GpuActivity()}


def test_the_activity_of_a_simulated_gpu_stands_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "gpu-0.json").write_text('{"utilisation": 0.5, "watts": 300, "celsius": 61}')
    (tmp_path / "gpu-1.json").write_text('{"utilisation": "much", "watts": null}')
    read = activity_reader(simulated(2), tmp_path)
    assert read() == {0: GpuActivity(0.5, 300.0, 61.0, 700.0), 1: GpuActivity()}


def test_a_power_limit_is_read_and_set_where_that_is_permitted(driver: FakeDriver) -> None:
    limits = power_limits(GPUS[:2])
    assert limits.read() == {0: PowerLimit(700.0, 200.0)}
    assert limits.set(0, 250.0) == ""
    assert limits.read() == {0: PowerLimit(250.0, 200.0)}
    driver.is_root = False
    assert limits.set(0, 700.0) == "Insufficient Permissions"
    driver.has_driver = False
    assert limits.read() == {}


def test_a_power_limit_of_a_simulated_gpu_is_kept_in_a_file_beside_its_own(tmp_path: Path) -> None:
    (tmp_path / "gpu-1.json").write_text(
        '{"power_limits": [100, 400], "keeps_power_limit": true, "watts": 90}'
    )
    limits = power_limits(simulated(2), tmp_path)
    assert limits.set(0, 250.0) == ""
    assert limits.set(1, 250.0) == "Insufficient Permissions"
    assert limits.read() == {0: PowerLimit(250.0, 200.0), 1: PowerLimit(400.0, 100.0)}
    assert activity_reader(simulated(2), tmp_path)()[1] == GpuActivity(None, 90.0, None, 400.0)
    (tmp_path / "gpu-0.limit.json").unlink()
    (tmp_path / "gpu-0.limit.json").symlink_to(tmp_path / "gpu-1.json")
    assert limits.set(0, 300.0)


def test_the_health_of_a_simulated_gpu_stands_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "gpu-0.json").write_text(
        '{"xids": [79, "x"], "uncorrected_errors": 2, "has_remap_failed": true, "celsius": 61,'
        ' "slowdown_celsius": 87, "utilisation": 0.5, "clock_mhz": 345, "max_clock_mhz": 1980}'
    )
    (tmp_path / "gpu-1.json").write_text('{"xids": "79", "is_lost": 1}')
    health = health_reader(simulated(2), tmp_path)()
    assert health[0] == GpuHealth(False, (79,), 2, True, 61.0, 87.0, 0.5, 345, 1980)
    assert health[1] == GpuHealth(utilisation=0.0)


def test_the_health_is_read_by_counters_and_events_and_what_is_not_supported_is_not_told(
    driver: FakeDriver,
) -> None:
    driver.xids = [("GPU-a", 31), ("GPU-a", 79)]
    health = health_reader(GPUS[:2])
    assert health()[0] == GpuHealth(False, (31, 79), 2, True, 61.0, 87.0, 0.97, 345, 1980, False)
    assert health()[0].xids == (31, 79)
    assert health()[1] == GpuHealth(uncorrected_errors=2, has_remap_failed=True, slowdown_celsius=87.0)
    driver.lost = "GPU-a"
    assert health()[0] == GpuHealth(is_lost=True)
