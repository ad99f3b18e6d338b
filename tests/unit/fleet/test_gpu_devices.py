"""The GPUs of the box: real through NVML, simulated without."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.contract.gpus import Gpu, check_gpu_request
from dynaplan.fleet.gpu_devices import inventory, nvml, simulated
from dynaplan.util.errors import CapacityError, ConfigError

REAL = (Gpu(0, "GPU-a", "H200", 1), Gpu(1, "GPU-b", "H200", 1), Gpu(2, "GPU-c", "H200", 1))


def real() -> tuple[Gpu, ...]:
    return REAL


def test_a_box_without_gpus_simulates_eight_or_as_many_as_asked() -> None:
    assert inventory(None, {}, read=tuple) == (simulated(8), True)
    assert inventory(3, {"CUDA_VISIBLE_DEVICES": ""}, read=tuple) == (simulated(3), True)
    assert [gpu.uuid for gpu in simulated(2)] == ["GPU-SIM-0", "GPU-SIM-1"]


def test_a_box_with_gpus_uses_those_that_it_may_see() -> None:
    assert inventory(None, {}, read=real) == (REAL, False)
    assert inventory(None, {"CUDA_VISIBLE_DEVICES": "2,0"}, read=real) == ((REAL[2], REAL[0]), False)
    assert inventory(1, {"CUDA_VISIBLE_DEVICES": "2,0"}, read=real) == ((REAL[2],), False)
    assert inventory(None, {"CUDA_VISIBLE_DEVICES": ""}, read=real) == ((), False)
    assert inventory(0, {}, read=real) == ((), False)


def test_of_more_gpus_than_are_asked_for_the_free_ones_are_taken_first() -> None:
    def chosen(number: int, *busy: int) -> tuple[Gpu, ...]:
        return inventory(number, {}, read=real, busy=lambda _: busy)[0]

    assert chosen(2) == REAL[:2]
    assert chosen(2, 0) == REAL[1:]
    assert chosen(2, 0, 1) == (REAL[0], REAL[2])
    assert chosen(3, 0) == REAL


def test_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"--gpus is 4, but this box has 3 GPUs"):
        inventory(4, {}, read=real)
    with pytest.raises(CapacityError, match=r"CUDA_VISIBLE_DEVICES='1' shows 1 of them"):
        inventory(2, {"CUDA_VISIBLE_DEVICES": "1"}, read=real)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus is -1"):
        inventory(-1, {}, read=tuple)


@pytest.mark.parametrize("gpus", [0, 0.25, 1, 1.0, 8])
def test_what_may_be_asked_for_does_not_raise(gpus: float) -> None:
    check_gpu_request(gpus, "VllmWorker")


@pytest.mark.parametrize("gpus", [-1, 1.5, 2.01])
def test_what_may_not_be_asked_for(gpus: float) -> None:
    with pytest.raises(ConfigError, match=r"VllmWorker: resources\.gpu"):
        check_gpu_request(gpus, "VllmWorker")


class FakeNvmlError(Exception):
    """``pynvml.NVMLError``."""


class FakeNotFound(FakeNvmlError):
    """``pynvml.NVMLError_NotFound``: an empty MIG position."""


def fake_nvml(
    devices: dict[str, list[str | None]], has_driver: bool = True, lost: tuple[str, ...] = ()
) -> SimpleNamespace:
    """A pynvml whose devices map uuid -> MIG slices (none: not in MIG mode).

    Copies: ``nvmlInit`` raises without a driver; ``nvmlDeviceGetMigMode`` raises on GPUs that do not
    know MIG; positions without a slice raise NVMLError_NotFound; old versions answer in bytes; a GPU that is
    ``lost`` is counted, and fails in every call.
    """

    def init() -> None:
        if not has_driver:
            raise FakeNvmlError("Library Not Found")

    def handle_of(position: int) -> str:
        uuid = list(devices)[position]
        if uuid in lost:
            raise FakeNvmlError("GPU is lost")
        return uuid

    def mig_mode(uuid: str) -> list[int]:
        if not devices[uuid]:
            raise FakeNvmlError("Not Supported")
        return [1, 1]

    def mig_handle(uuid: str, position: int) -> str:
        handle = devices[uuid][position]
        if handle is None:
            raise FakeNotFound
        return handle

    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        NVMLError_NotFound=FakeNotFound,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(devices),
        nvmlDeviceGetHandleByIndex=handle_of,
        nvmlDeviceGetMigMode=mig_mode,
        nvmlDeviceGetMaxMigDeviceCount=lambda uuid: len(devices[uuid]),
        nvmlDeviceGetMigDeviceHandleByIndex=mig_handle,
        nvmlDeviceGetUUID=lambda handle: handle.encode(),
        nvmlDeviceGetName=lambda handle: "NVIDIA H200",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=141),
    )


def use(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_nvml({}, has_driver=False))
    assert nvml() == ()


def test_gpus_are_listed_in_order_and_mig_gpus_as_their_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_nvml({"GPU-a": [], "GPU-b": ["MIG-x", None, "MIG-y"], "GPU-c": []}))
    assert [(gpu.index, gpu.uuid) for gpu in nvml()] == [
        (0, "GPU-a"),
        (1, "MIG-x"),
        (2, "MIG-y"),
        (3, "GPU-c"),
    ]
    assert nvml()[0] == Gpu(0, "GPU-a", "NVIDIA H200", 141)


def test_a_lost_gpu_is_left_out_with_a_warning_and_the_others_keep_their_indices(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, fake_nvml({"GPU-a": [], "GPU-b": [], "GPU-c": []}, lost=("GPU-b",)))
    assert [(gpu.index, gpu.uuid) for gpu in nvml()] == [(0, "GPU-a"), (2, "GPU-c")]
    assert "GPU 1 is left out, it cannot be read: GPU is lost" in caplog.text


def test_gpus_that_are_all_lost_are_not_replaced_by_simulated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, fake_nvml({"GPU-a": []}, lost=("GPU-a",)))
    with pytest.raises(CapacityError, match="no GPU of this box can be read: GPU is lost"):
        inventory(None, {})


@pytest.mark.gpu
def test_the_real_gpus_of_this_box_are_found() -> None:
    gpus = nvml()
    if not gpus:
        pytest.skip("no NVIDIA GPU here")
    assert all(gpu.uuid.startswith(("GPU-", "MIG-")) and gpu.name for gpu in gpus)
    assert [gpu.index for gpu in gpus] == list(range(len(gpus)))
