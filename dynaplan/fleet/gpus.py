"""The GPUs of the box, what is in use of them, and what may be asked of them."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.util.errors import ConfigError


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


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory of a GPU.

    ``pid`` is 0 where the driver does not tell it, as of other containers' processes; ``name`` is empty and
    ``uid`` -1 where the process cannot be looked at.
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
    """The work of one GPU at one moment: ``utilisation`` from 0 to 1, and its power draw in watts.

    None where the driver does not tell it, as of a MIG slice.
    """

    utilisation: float | None = None
    watts: float | None = None


def check_gpu_request(gpus: float, service: str) -> None:
    """Raise ConfigError unless a worker may ask for that many GPUs: 0, 1, 2 ... or a fraction below one."""
    if gpus < 0 or (gpus > 1 and gpus != int(gpus)):
        raise ConfigError(
            f"{service}: resources.gpu is {gpus:g}",
            hint="Expected a whole number (0, 1, 2 ...), or a fraction below 1 for workers that share a GPU.",
        )
