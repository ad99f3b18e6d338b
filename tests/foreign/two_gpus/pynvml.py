"""NVIDIA's library on a box of two GPUs: what ``dynaplan`` asks of it, and an error for all else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_DEVICE_MIG_ENABLE = 1
TOTAL_BYTES = 24 * 2**30
IDLE_BYTES = 300 * 2**20
"""What the driver holds of an idle GPU."""


class NVMLError(Exception):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return "580.1"


def nvmlDeviceGetCount() -> int:
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return int(uuid[4:12])


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-0000000{handle}-aaaa-bbbb-cccc-000000000000"


def nvmlDeviceGetName(handle: int) -> str:
    return "NVIDIA GeForce RTX 3090"


def nvmlDeviceGetMemoryInfo(handle: int, *_: Any, **__: Any) -> SimpleNamespace:
    used = IDLE_BYTES + sum(amount for _, amount in _holders(handle))
    return SimpleNamespace(total=TOTAL_BYTES, used=used, free=TOTAL_BYTES - used)


def nvmlDeviceGetMigMode(handle: int) -> list[int]:
    raise NVMLError_NotSupported


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=amount) for pid, amount in _holders(handle)]


def nvmlDeviceGetGraphicsRunningProcesses(handle: int) -> list[SimpleNamespace]:
    return []


def nvmlDeviceGetUtilizationRates(handle: int) -> SimpleNamespace:
    return SimpleNamespace(gpu=0, memory=0)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 50_000


def _holders(handle: int) -> list[tuple[int, int]]:
    found = []
    for file in Path(os.environ["TWO_GPUS"]).glob(f"{handle}.*"):
        pid = int(file.suffix[1:])
        if Path(f"/proc/{pid}").exists():
            found.append((pid, int(file.read_text() or 0)))
    return found


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.startswith("nvml"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        raise NVMLError(f"the stand-in has no {name}")

    return refuse
