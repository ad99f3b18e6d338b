"""The GPUs of this box, their memory in use and their activity: read through NVML, or simulated.

The use of simulated GPUs is in files that are written by hand. The file of simulated GPU 2 is ``gpu-2.json``
in the node directory (``DYNAPLAN_NODE_DIR``), read anew each time; without it the GPU is empty::

    {"used_bytes": 76000000000, "pids": [4711], "utilisation": 0.97, "watts": 642, "celsius": 61,
     "power_limits": [200, 700], "keeps_power_limit": false,
     "xids": [79], "uncorrected_errors": 2, "has_remap_failed": true, "is_lost": true, "slowdown_celsius": 87,
     "clock_mhz": 345, "max_clock_mhz": 1980, "is_throttled": false}

``power_limits`` are the least and the greatest limit. One that was set is in ``gpu-2.limit.json``, unless the
GPU ``keeps_power_limit``, as where setting it is root's.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from dynaplan.contract.gpus import (
    SIMULATED_UUID,
    Gpu,
    GpuActivity,
    GpuHealth,
    GpuProcess,
    GpuUse,
    PowerLimit,
    busy_gpus,
    visible_gpus,
)
from dynaplan.process.node_directory import node_dir
from dynaplan.util.errors import CapacityError, ConfigError

log = logging.getLogger(__name__)

DEFAULT_SIMULATED = 8

SIMULATED_BYTES = 80 * 2**30
"""The memory of a simulated GPU in bytes: an H100's."""

SIMULATED_POWER_LIMITS = (200.0, 700.0)
"""The least and the greatest power limit of a simulated GPU in watts: an H100's."""


def inventory(
    gpus_option: int | None,
    environ: Mapping[str, str],
    read: Callable[[], tuple[Gpu, ...]] | None = None,
    busy: Callable[[Sequence[Gpu]], Collection[int]] = lambda _: (),
) -> tuple[tuple[Gpu, ...], bool]:
    """Return the GPUs that a deployment may use, and whether they are simulated.

    On a box with GPUs: the ones that ``CUDA_VISIBLE_DEVICES`` of ``environ`` lets us see, the first
    ``gpus_option`` of them unless None, free ones before ``busy`` ones; a greater option raises
    CapacityError. On a box without:
    ``gpus_option`` simulated ones, 8 by default. ``read`` reads the real ones, from NVML unless in tests.
    """
    if gpus_option is not None and gpus_option < 0:
        raise ConfigError(f"--gpus is {gpus_option}", hint="Expected 0 or more.")
    real = (read or nvml)()
    if not real:
        return simulated(DEFAULT_SIMULATED if gpus_option is None else gpus_option), True
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    visible = visible_gpus(real, mask)
    if gpus_option is None:
        return visible, False
    if gpus_option > len(visible):
        masked = "" if mask is None else f", CUDA_VISIBLE_DEVICES={mask!r} shows {len(visible)} of them"
        raise CapacityError(
            f"--gpus is {gpus_option}, but this box has {len(real)} GPUs{masked}",
            hint=f"Expected at most {len(visible)}; leave --gpus out to use all of them.",
        )
    in_use = busy(visible) if gpus_option < len(visible) else ()
    chosen = sorted(visible, key=lambda gpu: gpu.index in in_use)[:gpus_option]
    return tuple(gpu for gpu in visible if gpu in chosen), False


def available_gpus(number: int | None) -> tuple[tuple[Gpu, ...], bool]:
    """Return ``inventory`` of this machine and process, with that number as ``gpus_option``."""
    return inventory(number, os.environ, busy=busy_now)


def simulated(count: int) -> tuple[Gpu, ...]:
    """Return ``count`` simulated GPUs: ``GPU-SIM-0``, ``GPU-SIM-1`` ..."""
    uuids = (f"{SIMULATED_UUID}{index}" for index in range(count))
    return tuple(Gpu(index, uuid, "simulated", SIMULATED_BYTES) for index, uuid in enumerate(uuids))


def nvml() -> tuple[Gpu, ...]:
    """Every GPU of the box in PCI bus order, a GPU in MIG mode as its slices; none without a driver.

    ``index`` counts the entries, so on a box without MIG it is NVML's index. NVML ignores
    ``CUDA_VISIBLE_DEVICES``. A GPU that cannot be read, as one that has fallen off the bus, is left out and
    counted. Raises CapacityError when none can be read.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return _all_devices(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _all_devices(pynvml: Any) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    index, fault = 0, None
    for position in range(pynvml.nvmlDeviceGetCount()):
        try:
            for handle in _slices(pynvml, pynvml.nvmlDeviceGetHandleByIndex(position)):
                found.append(_gpu(pynvml, index, handle))
                index += 1
        except pynvml.NVMLError as error:
            log.warning("GPU %d is left out, it cannot be read: %s", index, error)
            index, fault = index + 1, error
    if fault and not found:
        hint = "See what `nvidia-smi` and the kernel's log say; a reset of the GPU or a reboot may help."
        raise CapacityError(f"no GPU of this box can be read: {fault}", hint=hint)
    return tuple(found)


def driver_version() -> tuple[str, str]:
    """Return the version of the NVIDIA driver, and why there is none; one of them is empty."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return "", str(error)
    try:
        return _text(pynvml.nvmlSystemGetDriverVersion()), ""
    finally:
        pynvml.nvmlShutdown()


def _slices(pynvml: Any, device: Any) -> Iterator[Any]:
    """The device itself, or its MIG slices when it is in MIG mode: then it cannot be used as a whole."""
    try:
        is_mig = pynvml.nvmlDeviceGetMigMode(device)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:
        is_mig = False
    if not is_mig:
        yield device
        return
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(device)):
        try:
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(device, position)
        except pynvml.NVMLError_NotFound:
            continue


def _gpu(pynvml: Any, index: int, handle: Any) -> Gpu:
    uuid, name = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetName(handle)
    return Gpu(index, _text(uuid), _text(name), _memory_bytes(pynvml, handle))


def _memory_bytes(pynvml: Any, handle: Any) -> int:
    """Return a GPU's memory in bytes.

    0 where it has none of its own (GPUs that share the machine's memory do not tell).
    """
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return 0


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


T = TypeVar("T")

MAX_FILE_BYTES = 4096
"""The most that is read of a simulated GPU's file, in bytes."""


def uses_reader(gpus: Sequence[Gpu], directory: Path | None = None) -> Callable[[], Mapping[int, GpuUse]]:
    """Return the reader of these GPUs' memory in use, real or simulated; it may block, and never raises.

    ``directory`` has the files of simulated ones: the node directory by default.
    """
    directory = directory or node_dir(os.environ)
    if all(gpu.is_simulated for gpu in gpus):
        return lambda: simulated_uses(gpus, directory)
    uses = NvmlUses()
    return lambda: uses.of(gpus)


def activity_reader(
    gpus: Sequence[Gpu], directory: Path | None = None
) -> Callable[[], Mapping[int, GpuActivity]]:
    """Return the reader of these GPUs' utilisation and watts; else as ``uses_reader``."""
    directory = directory or node_dir(os.environ)
    if all(gpu.is_simulated for gpu in gpus):
        return lambda: {gpu.index: _simulated_activity(directory, gpu) for gpu in gpus}
    uses = NvmlUses()
    return lambda: uses.activity_of(gpus)


def health_reader(
    gpus: Sequence[Gpu], directory: Path | None = None
) -> Callable[[], Mapping[int, GpuHealth]]:
    """Return the reader of these GPUs' health, real or simulated; it may block, and never raises.

    The events in it, such as Xid errors, are all since its first call. ``directory``: see ``uses_reader``.
    """
    directory = directory or node_dir(os.environ)
    if all(gpu.is_simulated for gpu in gpus):
        return lambda: {gpu.index: _simulated_health(directory, gpu) for gpu in gpus}
    return NvmlHealth(gpus).read


def power_limits(gpus: Sequence[Gpu], directory: Path | None = None) -> PowerLimits:
    """Return the reader and setter of these GPUs' power limits, real or simulated; it may block.

    Neither method raises.

    ``set`` returns why a limit was not set, empty when it was.
    """
    if all(gpu.is_simulated for gpu in gpus):
        return SimulatedPowerLimits(gpus, directory or node_dir(os.environ))
    return NvmlPowerLimits(gpus)


class NvmlPowerLimits:
    """Reads and sets the power limits of real GPUs; NVML counts in milliwatts."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = {gpu.index: gpu for gpu in gpus}
        self._is_open = False

    def read(self) -> dict[int, PowerLimit]:
        import pynvml

        found: dict[int, PowerLimit] = {}
        with suppress(pynvml.NVMLError):
            if not self._is_open:
                pynvml.nvmlInit()
        for index, gpu in self._gpus.items():
            with suppress(pynvml.NVMLError):  # a MIG slice has none
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                limit = pynvml.nvmlDeviceGetPowerManagementLimit(handle)
                least, _ = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
                found[index] = PowerLimit(limit / 1000, least / 1000)
        self._is_open = bool(found)
        return found

    def set(self, index: int, watts: float) -> str:
        import pynvml

        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(self._gpus[index].uuid)
            pynvml.nvmlDeviceSetPowerManagementLimit(handle, round(watts * 1000))
        except pynvml.NVMLError as error:
            return str(error)
        return ""


class SimulatedPowerLimits:
    """Reads and sets the power limits of simulated GPUs, in the files that stand for their driver."""

    def __init__(self, gpus: Sequence[Gpu], directory: Path) -> None:
        self._indices = [gpu.index for gpu in gpus]
        self._directory = directory

    def read(self) -> dict[int, PowerLimit]:
        return {index: simulated_power_limit(self._directory, index) for index in self._indices}

    def set(self, index: int, watts: float) -> str:
        if _read_file(self._directory / f"gpu-{index}.json").get("keeps_power_limit"):
            return "Insufficient Permissions"
        path = self._directory / f"gpu-{index}.limit.json"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            return str(error)
        with os.fdopen(fd, "w") as file:
            json.dump({"watts": watts}, file)
        return ""


def simulated_power_limit(directory: Path, index: int) -> PowerLimit:
    """Return the limit of a simulated GPU: what was set, else its greatest."""
    limits = _read_file(directory / f"gpu-{index}.json").get("power_limits")
    known = isinstance(limits, list) and len(limits) == 2 and all(isinstance(n, int | float) for n in limits)
    least, greatest = limits if known and isinstance(limits, list) else SIMULATED_POWER_LIMITS
    is_set = _read_file(directory / f"gpu-{index}.limit.json").get("watts")
    return PowerLimit(float(is_set if isinstance(is_set, int | float) else greatest), float(least))


PowerLimits = NvmlPowerLimits | SimulatedPowerLimits


class NvmlHealth:
    """Reads counters, and listens to Xid events, of real GPUs. NVML stays open."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self._gpus = gpus
        self._events: Any = None
        self._xids: dict[str, list[int]] = {}

    def read(self) -> dict[int, GpuHealth]:
        """Return index -> health; nothing without a driver. Blocks while it does not answer."""
        import pynvml

        try:
            if self._events is None:
                pynvml.nvmlInit()
                self._events = self._listen(pynvml)
            self._take_events(pynvml)
        except pynvml.NVMLError as error:
            log.debug("the driver tells no events: %s", error)
        found = {}
        for gpu in self._gpus:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                found[gpu.index] = _nvml_health(pynvml, handle, tuple(self._xids.get(gpu.uuid, ())))
            except pynvml.NVMLError_GpuIsLost:
                found[gpu.index] = GpuHealth(is_lost=True)
            except pynvml.NVMLError:
                continue
        return found

    def _listen(self, pynvml: Any) -> Any:
        events = pynvml.nvmlEventSetCreate()
        for gpu in self._gpus:
            with suppress(pynvml.NVMLError):  # a MIG slice has none of its own
                handle = pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
                pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _take_events(self, pynvml: Any) -> None:
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._events, 0)
            except pynvml.NVMLError_Timeout:
                return
            uuid = _text(pynvml.nvmlDeviceGetUUID(event.device))
            self._xids.setdefault(uuid, []).append(int(event.eventData))


def _nvml_health(pynvml: Any, handle: Any, xids: tuple[int, ...]) -> GpuHealth:
    """Return what this GPU tells; a call that it does not support counts as nothing told."""

    def told(call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except pynvml.NVMLError_GpuIsLost:
            raise
        except pynvml.NVMLError:
            return otherwise

    reasons = told(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle), 0)
    sensor, threshold = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    uncorrected, since_load = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    return GpuHealth(
        xids=xids,
        uncorrected_errors=told(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(handle, uncorrected, since_load), 0
        ),
        has_remap_failed=told(lambda: bool(pynvml.nvmlDeviceGetRemappedRows(handle)[3]), False),
        celsius=told(lambda: float(pynvml.nvmlDeviceGetTemperature(handle, sensor)), None),
        slowdown_celsius=told(
            lambda: float(pynvml.nvmlDeviceGetTemperatureThreshold(handle, threshold)), 0.0
        ),
        utilisation=told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, None),
        clock_mhz=told(lambda: int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)), 0),
        max_clock_mhz=told(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)), 0),
        is_throttled=bool(reasons & ~pynvml.nvmlClocksThrottleReasonGpuIdle),
    )


def busy_now(gpus: Sequence[Gpu]) -> set[int]:
    """Return the indices of the real GPUs whose memory is in use at this moment."""
    return set(busy_gpus(gpus, NvmlUses().of(gpus)))


class NvmlUses:
    """Reads the real GPUs. NVML stays open: opening it wakes every unused GPU, which takes a second.

    GPUs that cannot be read are left out, by ``of`` also those that do not tell their memory. Where none can
    be read, as without a driver, the next call opens NVML anew.
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

        found: dict[int, T] = {}
        try:
            if not self._is_open:
                pynvml.nvmlInit()
        except pynvml.NVMLError:
            return found
        for gpu in gpus:
            with suppress(pynvml.NVMLError):
                found[gpu.index] = read(pynvml, gpu)
        self._is_open = bool(found)
        return found


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
    utilisation = watts = celsius = limit_watts = None
    try:
        utilisation = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except pynvml.NVMLError:
        pass  # a MIG slice has none
    try:
        watts = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
    except pynvml.NVMLError:
        pass
    with suppress(pynvml.NVMLError):
        celsius = float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))
    with suppress(pynvml.NVMLError):
        limit_watts = pynvml.nvmlDeviceGetPowerManagementLimit(handle) / 1000
    return GpuActivity(utilisation, watts, celsius, limit_watts)


def process_of(pid: int) -> GpuProcess:
    """Return the process with its name and user, as far as it can be inspected."""
    import psutil  # much, for a process that may never read a GPU

    try:
        process = psutil.Process(pid)
        return GpuProcess(pid, process.name(), process.uids().real)
    except (psutil.Error, ValueError, OverflowError):
        return GpuProcess(max(0, pid))


def simulated_uses(gpus: Sequence[Gpu], directory: Path) -> dict[int, GpuUse]:
    """Return the use of simulated GPUs as the files in the node directory say it: index -> use."""
    uses = {}
    for gpu in gpus:
        document = _read_file(directory / f"gpu-{gpu.index}.json")
        used_bytes = document.get("used_bytes", 0)
        pids = document.get("pids", [])
        if isinstance(used_bytes, int | float) and 0 <= used_bytes < 2**63:
            numbers = [pid for pid in pids if isinstance(pid, int)] if isinstance(pids, list) else []
            uses[gpu.index] = GpuUse(int(used_bytes), tuple(map(process_of, numbers)))
    return uses


def _simulated_activity(directory: Path, gpu: Gpu) -> GpuActivity:
    document = _read_file(directory / f"gpu-{gpu.index}.json")
    known = (document.get(name) for name in ("utilisation", "watts", "celsius"))
    found = (float(each) if isinstance(each, int | float) else None for each in known)
    activity = GpuActivity(*found)
    if activity.watts is None:
        return activity
    return replace(activity, limit_watts=simulated_power_limit(directory, gpu.index).watts)


def _simulated_health(directory: Path, gpu: Gpu) -> GpuHealth:
    document = _read_file(directory / f"gpu-{gpu.index}.json")

    def number(name: str) -> float:
        found = document.get(name)
        return float(found) if isinstance(found, int | float) else 0.0

    xids = document.get("xids")
    return GpuHealth(
        is_lost=document.get("is_lost") is True,
        xids=tuple(each for each in xids if isinstance(each, int)) if isinstance(xids, list) else (),
        uncorrected_errors=int(number("uncorrected_errors")),
        has_remap_failed=document.get("has_remap_failed") is True,
        celsius=number("celsius") or None,
        slowdown_celsius=number("slowdown_celsius"),
        utilisation=number("utilisation"),
        clock_mhz=int(number("clock_mhz")),
        max_clock_mhz=int(number("max_clock_mhz")),
        is_throttled=document.get("is_throttled") is True,
    )


def _read_file(path: Path) -> Mapping[str, Any]:
    """Return the file's object; empty for none, and for anything else that stands there."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return {}
    try:
        text = os.read(fd, MAX_FILE_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        document = json.loads(text)
    except (OSError, ValueError, RecursionError):
        return {}
    finally:
        os.close(fd)
    return document if isinstance(document, dict) else {}
