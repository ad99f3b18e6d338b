"""Which GPUs a worker gets, and whether a graph fits the box.

A GPU belongs to one worker, or to several workers that each hold the same fraction of it: the
fractions of one GPU are never mixed, as in the original's allocator.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from dynaplan.contract.gpus import Gpu, by_reason, check_gpu_request, indices
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role, Worker, worker_name
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.util.amounts import GIB
from dynaplan.util.errors import CapacityError
from dynaplan.util.tables import text_table

Choice = tuple[tuple[int, ...], float]
"""The indices of the GPUs, and the share of each: 1.0 unless fractional."""


def choose_gpus(
    inventory: Sequence[Gpu], fleet: Sequence[Worker], unusable: Collection[int], gpus: float
) -> Choice | None:
    """The GPUs for one more worker that asks for ``gpus`` of them; None when they are not free now.

    A whole number gets that many whole GPUs, the first free ones of the inventory; a fraction joins
    the first GPU whose workers hold the same fraction and that has room, else the first free one; 0 gets
    none. ``unusable`` are indices that belong to somebody else. Raises ConfigError for 1.5 and the like.
    """
    check_gpu_request(gpus, "worker")
    shares = _shares(fleet)
    usable = [gpu.index for gpu in inventory if gpu.index not in unusable]
    free = [index for index in usable if index not in shares]
    if gpus >= 1 or gpus == 0:
        return (tuple(free[: int(gpus)]), 1.0) if len(free) >= gpus else None
    per_gpu = int(1 / gpus + 1e-9)
    shared = [i for i in usable if set(shares.get(i, ())) == {gpus} and len(shares[i]) < per_gpu]
    chosen = (shared or free)[:1]
    return (tuple(chosen), gpus) if chosen else None


def _shares(fleet: Sequence[Worker]) -> dict[int, list[float]]:
    """Return the shares of each held GPU: index -> the share of each holder."""
    shares: dict[int, list[float]] = {}
    for worker in fleet:
        for index in worker.gpus if worker.state in HOLDS_GPUS else ():
            shares.setdefault(index, []).append(worker.gpu_share)
    return shares


def check_fits(graph: GraphSpec, inventory: Sequence[Gpu], unusable: Mapping[int, str]) -> None:
    """Raise CapacityError when the graph's first workers do not all get their GPUs.

    The message says what each service asks for, what there is, and what to do. ``unusable`` are GPUs that
    somebody else has: index -> a description of the holder.
    """
    if all(worker is not None for _, worker in _first_workers(graph, inventory, unusable)):
        return
    asking = [each for each in _own_process(graph) if each.gpus > 0 and each.first_workers]
    asks = ", ".join(f"{service.name} {service.workers} x {service.gpus:g}" for service in asking)
    taken = "".join(f"; {line}" for line in by_reason(unusable, inventory))
    raise CapacityError(
        f"the graph does not fit the GPUs of this box: it asks for {asks} (workers x GPUs); "
        f"there are {len(inventory)} visible{taken}",
        hint=(
            "Lower ServiceArgs.workers or ServiceArgs.resources.gpu of a service"
            + (", stop what has the others" if taken else "")
            + ", or let it see more GPUs (CUDA_VISIBLE_DEVICES, --gpus)."
            + (" --use-busy-gpus takes GPUs that are in use, too." if " in use " in taken else "")
        ),
    )


def gpu_map(
    graph: GraphSpec,
    inventory: Sequence[Gpu],
    unusable: Mapping[int, str],
    models: Mapping[str, str],
    *,
    has_gpus: bool = True,
) -> str:
    """Return two tables for ``--dry-run``: the graph's first workers, and the GPUs that each would get.

    ``models`` are the models of services, by name. A UUID is cut to its first part, which
    ``CUDA_VISIBLE_DEVICES`` takes as well. Where the inventory stands for cores (not ``has_gpus``) no GPU is
    shown.
    """
    rows = [("WORKER", "ROLE", "GPUS", "MODEL")]
    holders: dict[int, list[str]] = {}
    for (name, component, role), worker in _first_workers(graph, inventory, unusable):
        share = "" if worker is None or worker.gpu_share == 1 else f" ({worker.gpu_share:g})"
        held = indices(worker.gpus) if worker and has_gpus else ""
        gpus = "does not fit" if worker is None else (held or "-") + share
        rows.append((name, role.value, gpus, models.get(component, "")))
        for index in worker.gpus if worker else ():
            holders.setdefault(index, []).append(name)
    tables = [text_table(rows)]
    if inventory and has_gpus:
        gpu_rows = [
            (
                str(gpu.index),
                gpu.name or "-",
                f"{gpu.memory_bytes / GIB:.0f} GiB" if gpu.memory_bytes else "-",
                "-".join(gpu.uuid.split("-")[: 3 if gpu.is_simulated else 2]),
                unusable.get(gpu.index) or ", ".join(holders.get(gpu.index, ())) or "free",
            )
            for gpu in inventory
        ]
        tables.append(text_table([("GPU", "NAME", "MEMORY", "UUID", "GOES TO"), *gpu_rows]))
    return "\n\n".join(tables)


def worker_environment(
    worker: Worker, inventory: Sequence[Gpu], envs: Mapping[str, str], visible: Sequence[int] = ()
) -> dict[str, str]:
    """Return a worker's variables beyond those of ``serve``: ``ServiceArgs.envs``, its name, its GPUs.

    A worker without GPUs gets no ``CUDA_VISIBLE_DEVICES``, as in Dynamo; a ``CUDA_VISIBLE_DEVICES`` in
    ``envs`` is never overwritten. ``visible`` are the GPUs that the worker has to see, where they are more
    than its own. ``DYNAPLAN_GPUS`` is its number of GPUs: ``2``, ``0.5``, ``0``; where models share GPUs,
    ``DYNAPLAN_MEMORY_FRACTION`` is the part of their memory that it was given.
    """
    environment = {
        **envs,
        "DYNAPLAN_WORKER_NAME": worker.name,
        "DYNAPLAN_GPUS": f"{worker.gpu_request:g}",
    }
    if worker.gpus:
        uuids = {gpu.index: gpu.uuid for gpu in inventory}
        mask = ",".join(uuids[index] for index in visible or worker.gpus)
        environment["CUDA_VISIBLE_DEVICES"] = envs.get("CUDA_VISIBLE_DEVICES", mask)
        environment["CUDA_DEVICE_ORDER"] = envs.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        smallest = min((gpu.memory_bytes for gpu in inventory if gpu.index in worker.gpus), default=0)
        if worker.memory_bytes and smallest:
            environment["DYNAPLAN_MEMORY_FRACTION"] = f"{worker.memory_bytes / smallest:.4f}"
    return environment


def _first_workers(
    graph: GraphSpec, inventory: Sequence[Gpu], unusable: Collection[int]
) -> Iterator[tuple[tuple[str, str, Role], Worker | None]]:
    """Yield every worker that the graph starts with, or None in its place when its GPUs are not there."""
    fleet: list[Worker] = []
    for service in _own_process(graph):
        check_gpu_request(service.gpus, service.name)
        for index in range(service.first_workers):
            name = worker_name(graph.namespace, service.name, index)
            choice = choose_gpus(inventory, fleet, unusable, service.gpus)
            if choice is None:
                yield (name, service.name, service.role), None
                continue
            fleet.append(Worker(name, service.name, service.role, gpus=choice[0], gpu_share=choice[1]))
            yield (name, service.name, service.role), fleet[-1]


def _own_process(graph: GraphSpec) -> list[ServiceSpec]:
    return [service for service in graph.services if not service.in_process_of]
