"""The GPUs of the box, what is in use of them, and which of them are busy.

A GPU is busy when more of its memory is in use than an engine can do without: a tenth, or 2 GiB where that
is more. vLLM refuses to start when less than its ``gpu-memory-utilization``, 0.9 by default, is free. Below
that lie what a driver holds of an idle GPU (0.3 to 0.8 GB on an H100), a desktop, and a monitoring tool. A
GPU that does not report its memory, because it shares the machine's, is never busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dynaplan.util.amounts import gib_of
from dynaplan.util.errors import ConfigError

SIMULATED_UUID = "GPU-SIM-"
"""The beginning of a simulated GPU's UUID."""


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG slice of a GPU, that workers may be given.

    ``index`` is its number in the box's inventory, in PCI bus order; ``uuid`` is what a worker gets in
    ``CUDA_VISIBLE_DEVICES`` (``GPU-...``, ``MIG-...``, or ``GPU-SIM-n`` when it is simulated).
    """

    index: int
    uuid: str
    name: str = ""
    memory_bytes: int = 0

    @property
    def is_simulated(self) -> bool:
        return self.uuid.startswith(SIMULATED_UUID)


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    ``pid`` is 0 where the driver does not tell it, as of other containers' processes; ``name`` is empty and
    ``uid`` -1 where the process cannot be inspected.
    """

    pid: int
    name: str = ""
    uid: int = -1


@dataclass(frozen=True)
class GpuUse:
    """The memory of one GPU in use at one moment, in bytes, and the processes that hold it."""

    used_bytes: int = 0
    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True)
class GpuActivity:
    """The work of one GPU at one moment: ``utilisation`` from 0 to 1, its power draw, its temperature.

    ``limit_watts`` is the most that it may draw.
    None where the driver does not tell it, as of a MIG slice.
    """

    utilisation: float | None = None
    watts: float | None = None
    celsius: float | None = None
    limit_watts: float | None = None


@dataclass(frozen=True)
class PowerLimit:
    """The most that a GPU may draw, and the least that its driver takes as such a limit."""

    watts: float
    least_watts: float


@dataclass(frozen=True)
class GpuHealth:
    """What the driver tells of the health of one GPU; None and 0 where it does not.

    ``xids`` are the events since this process began to listen, ``uncorrected_errors`` those of its memory
    since the driver was loaded. ``is_throttled``: heat, power or a setting keeps its clock down.
    """

    is_lost: bool = False
    xids: tuple[int, ...] = ()
    uncorrected_errors: int = 0
    has_remap_failed: bool = False
    celsius: float | None = None
    slowdown_celsius: float = 0.0
    utilisation: float | None = None
    clock_mhz: int = 0
    max_clock_mhz: int = 0
    is_throttled: bool = False


def check_gpu_request(gpus: float, service: str) -> None:
    """Raise ConfigError unless a worker may ask for that many GPUs: 0, 1, 2 ... or a fraction below one."""
    if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
        raise ConfigError(
            f"{service}: resources.gpu is {gpus:g}",
            hint="Expected a whole number (0, 1, 2 ...), or a fraction below 1 for workers that share a GPU.",
        )


BUSY_SHARE = 0.1
"""The share of a GPU's memory from which on it is busy."""

BUSY_BYTES = 2 * 2**30
"""The memory in bytes from which on a small GPU is busy."""

"""A gigabyte of GPU memory in bytes, as the makers count it in the names of their GPUs."""

UNREADABLE = "its memory cannot be read (see `nvidia-smi`)"
"""The reason why no worker gets a GPU that ``is_unreadable``."""

NOT_READ = "its memory has not been read since its last worker ended"
"""The reason why no worker gets a GPU for the moment."""

BEING_FREED_S = 30.0
"""Time for which memory that is still in use after a worker's end is thought to be that worker's."""

SHOWN_PROCESSES = 3
"""The number of processes of one GPU that are named."""


def is_busy(gpu: Gpu, use: GpuUse) -> bool:
    """Tell whether too much of the GPU's memory is in use to give the GPU to a worker."""
    return bool(gpu.memory_bytes) and use.used_bytes > max(BUSY_BYTES, BUSY_SHARE * gpu.memory_bytes)


def is_unreadable(gpu: Gpu, uses: Mapping[int, GpuUse]) -> bool:
    """Tell whether a GPU with memory of its own is missing from the readings although others are there."""
    return bool(uses and gpu.memory_bytes) and gpu.index not in uses


def busy_gpus(inventory: Iterable[Gpu], uses: Mapping[int, GpuUse]) -> dict[int, str]:
    """Return the GPUs that are busy, with a description of the use, and those that cannot be read."""
    return {
        gpu.index: UNREADABLE if is_unreadable(gpu, uses) else use_in_words(gpu, uses[gpu.index])
        for gpu in inventory
        if is_unreadable(gpu, uses) or (gpu.index in uses and is_busy(gpu, uses[gpu.index]))
    }


def use_in_words(gpu: Gpu, use: GpuUse) -> str:
    """Return ``71 of 80 GiB in use by pid 4711 (python, uid 1001)``."""
    amount = f"{gib_of(use.used_bytes, gpu.memory_bytes)} in use"
    seen = [process for process in use.processes if process.pid]
    if not seen:
        return f"{amount} by a process that cannot be seen from here"
    shown = ", ".join(map(_process_in_words, seen[:SHOWN_PROCESSES]))
    more = len(seen) - SHOWN_PROCESSES
    return f"{amount} by {shown}" + (f" and {more} more" if more > 0 else "")


def _process_in_words(process: GpuProcess) -> str:
    known = [process.name] if process.name else []
    known += [f"uid {process.uid}"] if process.uid >= 0 else []
    return f"pid {process.pid}" + (f" ({', '.join(known)})" if known else "")


def indices(numbers: Sequence[int]) -> str:
    """Return the indices of GPUs as they are written: ``0,2,3``."""
    return ",".join(map(str, numbers))


def by_reason(unusable: Mapping[int, str], inventory: Iterable[Gpu]) -> list[str]:
    """Return a line for each reason for which GPUs of the inventory cannot be used: ``GPU 1,2: ...``."""
    reasons: dict[str, list[int]] = {}
    for gpu in inventory:
        if gpu.index in unusable:
            reasons.setdefault(unusable[gpu.index], []).append(gpu.index)
    return [f"GPU {indices(numbers)}: {why}" for why, numbers in reasons.items()]


def visible_gpus(inventory: Sequence[Gpu], mask: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that a process with this ``CUDA_VISIBLE_DEVICES`` may use, in the mask's order.

    As the CUDA driver reads it: not set (None) is all; empty is none; an entry is an index or the
    beginning of a UUID that fits exactly one GPU; the first invalid entry ends the list (``0,-1,1`` is
    GPU 0); a GPU named twice voids all of it. Source: CUDA C programming guide, "CUDA environment
    variables", and ``torch.cuda._parse_visible_devices`` for the repetition.
    """
    if mask is None:
        return tuple(inventory)
    visible: list[Gpu] = []
    for entry in mask.split(","):
        gpu = _named(inventory, entry.strip())
        if gpu is None:
            break
        if gpu in visible:
            return ()
        visible.append(gpu)
    return tuple(visible)


def _named(inventory: Sequence[Gpu], entry: str) -> Gpu | None:
    if entry.isdecimal():
        return next((gpu for gpu in inventory if gpu.index == int(entry)), None)
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    exact = [gpu for gpu in inventory if gpu.uuid == entry]
    found = exact or [gpu for gpu in inventory if gpu.uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None
