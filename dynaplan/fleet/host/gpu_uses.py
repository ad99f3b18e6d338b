"""The memory of GPUs in use, and their activity: of real ones through NVML, of simulated ones from files.

Those are written by hand. The file of simulated GPU 2 is ``gpu-2.json`` in the node directory
(``DYNAPLAN_NODE_DIR``), read anew each time; without it the GPU is empty::

    {"used_bytes": 76000000000, "pids": [4711], "utilisation": 0.97, "watts": 642}
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import psutil

from dynaplan.fleet.gpus import Gpu, GpuActivity, GpuProcess, GpuUse
from dynaplan.fleet.host.gpus import SIMULATED_UUID
from dynaplan.fleet.rules.busy_gpus import busy_gpus

T = TypeVar("T")

LONGEST_FILE_BYTES = 4096
"""The most that is read of a simulated GPU's file, in bytes."""


def uses_reader(gpus: Sequence[Gpu], directory: Path) -> Callable[[], Mapping[int, GpuUse]]:
    """Return the reader of these GPUs, real or simulated ones; ``directory`` is the node directory."""
    if all(gpu.uuid.startswith(SIMULATED_UUID) for gpu in gpus):
        return lambda: simulated_uses(gpus, directory)
    uses = NvmlUses()
    return lambda: uses.of(gpus)


def activity_reader(gpus: Sequence[Gpu], directory: Path) -> Callable[[], Mapping[int, GpuActivity]]:
    """Return the reader of the activity of these GPUs; ``directory`` is the node directory."""
    if all(gpu.uuid.startswith(SIMULATED_UUID) for gpu in gpus):
        return lambda: {gpu.index: _simulated_activity(directory, gpu) for gpu in gpus}
    uses = NvmlUses()
    return lambda: uses.activity_of(gpus)


def busy_now(gpus: Sequence[Gpu]) -> set[int]:
    """Return the indices of the real GPUs whose memory is in use at this moment."""
    return set(busy_gpus(gpus, NvmlUses().of(gpus)))


class NvmlUses:
    """Reads the real GPUs. NVML stays open: opening it wakes every unused GPU, which takes a second.

    ``of`` leaves out GPUs that do not tell their memory, and returns nothing where the driver does not
    answer; the next call opens NVML anew then.
    """

    def __init__(self) -> None:
        self._is_open = False

    def of(self, gpus: Iterable[Gpu]) -> dict[int, GpuUse]:
        """Return index -> use. Blocks while the driver does not answer."""
        uses = self._read(gpus, _nvml_use)
        return {index: use for index, use in uses.items() if use is not None}

    def activity_of(self, gpus: Iterable[Gpu]) -> dict[int, GpuActivity]:
        """Return index -> activity. Blocks while the driver does not answer."""
        return self._read(gpus, _nvml_activity)

    def _read(self, gpus: Iterable[Gpu], read: Callable[[Any, Gpu], T]) -> dict[int, T]:
        import pynvml

        try:
            if not self._is_open:
                pynvml.nvmlInit()
                self._is_open = True
            return {gpu.index: read(pynvml, gpu) for gpu in gpus}
        except pynvml.NVMLError:
            self._is_open = False
            return {}


def _nvml_use(pynvml: Any, gpu: Gpu) -> GpuUse | None:
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    try:
        used_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    except pynvml.NVMLError:
        return None
    held_bytes: dict[int, int] = {}
    for read in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            for process in read(handle):
                held_bytes[process.pid] = max(held_bytes.get(process.pid, 0), process.usedGpuMemory or 0)
        except pynvml.NVMLError:
            continue
    pids = sorted(held_bytes, key=lambda pid: (-held_bytes[pid], pid))
    return GpuUse(used_bytes, tuple(map(process_of, pids)))


def _nvml_activity(pynvml: Any, gpu: Gpu) -> GpuActivity:
    handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
    utilisation = watts = None
    try:
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except pynvml.NVMLError:
        pass  # a MIG slice has none
    try:
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except pynvml.NVMLError:
        pass
    return GpuActivity(utilisation, watts)


def process_of(pid: int) -> GpuProcess:
    """Return the process with its name and user, as far as it can be looked at."""
    try:
        process = psutil.Process(pid)
        return GpuProcess(pid, process.name(), process.uids().real)
    except (psutil.Error, ValueError, OverflowError):
        return GpuProcess(max(0, pid))


def simulated_uses(gpus: Sequence[Gpu], directory: Path) -> dict[int, GpuUse]:
    """Return the use of simulated GPUs as the files in the node directory say it: index -> use."""
    uses = {}
    for gpu in gpus:
        document = _read(directory / f"gpu-{gpu.index}.json")
        used_bytes = document.get("used_bytes", 0)
        pids = document.get("pids", [])
        if isinstance(used_bytes, int | float) and 0 <= used_bytes < 2**63:
            numbers = [pid for pid in pids if isinstance(pid, int)] if isinstance(pids, list) else []
            uses[gpu.index] = GpuUse(int(used_bytes), tuple(map(process_of, numbers)))
    return uses


def _simulated_activity(directory: Path, gpu: Gpu) -> GpuActivity:
    document = _read(directory / f"gpu-{gpu.index}.json")
    utilisation, watts = document.get("utilisation"), document.get("watts")
    return GpuActivity(
        float(utilisation) if isinstance(utilisation, int | float) else None,
        float(watts) if isinstance(watts, int | float) else None,
    )


def _read(path: Path) -> Mapping[str, Any]:
    """Return the file's object; empty for none, and for anything else that stands there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        text = os.read(fd, LONGEST_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        document = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return document if isinstance(document, dict) else {}
