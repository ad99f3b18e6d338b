"""The GPUs of the box, what is in use of them, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from dynaplan.util.documents import text_field, text_list_field, whole_field
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


@dataclass(frozen=True)
class GpuPool:
    """A component whose workers hold whole GPUs: ``gpus`` each; ``ready`` of them answer requests."""

    component: str
    gpus: int
    ready: int


@dataclass(frozen=True)
class GpuShare:
    """The words of one deployment about its GPUs to the others that share the box's GPUs with it.

    GPUs are named by UUID. ``reserved`` is the number that no other takes from it, ``visible`` are the ones
    that it may use at all, ``left_out`` the ones that nobody claims and that it cannot use all the same.
    ``wants`` is the number that it would hold with its next worker, ``wants_in_all`` with every worker asked
    for; both are what it holds when it lacks none. ``leaving`` are those of workers on their way out,
    ``promised`` is the number of a worker that was chosen to leave a moment ago. ``held`` is not part of what
    it says: its claims tell it.
    """

    namespace: str
    pid: int
    priority: int
    reserved: int
    visible: frozenset[str]
    wants: int = 0
    wants_in_all: int = 0
    pools: tuple[GpuPool, ...] = ()
    leaving: frozenset[str] = frozenset()
    promised: int = 0
    left_out: frozenset[str] = frozenset()
    held: frozenset[str] = frozenset()

    @property
    def needs(self) -> int:
        """The GPUs that its next worker lacks, 0 when there is none or when it holds them already."""
        return max(0, self.wants - len(self.held))

    @property
    def coming(self) -> int:
        """The GPUs that it is about to give back."""
        return len(self.leaving & self.held) + self.promised

    def to_record(self) -> dict[str, Any]:
        """Return its form in JSON."""
        record = asdict(replace(self, pools=()))
        del record["held"]
        texts = {name: sorted(value) for name, value in record.items() if isinstance(value, frozenset)}
        return {**record, **texts, "pools": [asdict(pool) for pool in self.pools]}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], held: frozenset[str]) -> GpuShare:
        """Read its form in JSON; raises ValueError when it is not one."""
        pools = record.get("pools")
        if not isinstance(pools, list) or not all(isinstance(pool, dict) for pool in pools):
            raise ValueError("'pools' is no list of JSON objects")
        return cls(
            namespace=text_field(record, "namespace"),
            pid=whole_field(record, "pid"),
            priority=whole_field(record, "priority"),
            reserved=whole_field(record, "reserved"),
            visible=frozenset(text_list_field(record, "visible")),
            wants=whole_field(record, "wants"),
            wants_in_all=whole_field(record, "wants_in_all"),
            pools=tuple(
                GpuPool(text_field(pool, "component"), whole_field(pool, "gpus"), whole_field(pool, "ready"))
                for pool in pools
            ),
            leaving=frozenset(text_list_field(record, "leaving")),
            promised=whole_field(record, "promised"),
            left_out=frozenset(text_list_field(record, "left_out")),
            held=held,
        )


@dataclass(frozen=True)
class NodeGpus:
    """The GPUs of the machine as one deployment finds them, by UUID.

    ``held`` are its own claims, ``claimed`` those of every living deployment and user, ``shares`` what the
    other deployments of its user say.
    """

    held: frozenset[str]
    claimed: frozenset[str]
    shares: tuple[GpuShare, ...]
