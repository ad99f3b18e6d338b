"""The GPUs at the start: which ones are there, which ones somebody else has, and what would run on them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaplan.config.service_config import section_options
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.contract.gpus import Gpu, busy_gpus, by_reason
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.gpu_devices import available_gpus, uses_reader
from dynaplan.fleet.plugin.gpu_availability import GpuClaims
from dynaplan.fleet.rules import allocation
from dynaplan.fleet.rules.statefile import Document, fleet_of, inventory_of
from dynaplan.graph.model import GraphSpec
from dynaplan.process import process_table
from dynaplan.util.errors import CapacityError

GPU_FREE_TIMEOUT_S = 5.0
"""Time in which a driver takes back the memory of processes that were killed a moment ago, in seconds."""

GPU_USE_POLL_S = 0.1


def in_use(gpus: Sequence[Gpu], claimed: Iterable[int], waits_s: float = 0.0) -> dict[int, str]:
    """Return the GPUs whose memory others use: index -> a description of the holder.

    ``claimed`` are left out: other deployments have them. Waits ``waits_s`` seconds for memory to be freed.
    """
    read = uses_reader(gpus)
    unclaimed = [gpu for gpu in gpus if gpu.index not in set(claimed)]
    until_s = time.monotonic() + waits_s
    while (busy := busy_gpus(unclaimed, read())) and time.monotonic() < until_s:
        time.sleep(GPU_USE_POLL_S)
    return busy


def shows_gpus(
    inventory: Sequence[Gpu], asked: Iterable[tuple[str, float]], config: Mapping[str, Mapping[str, Any]]
) -> bool:
    """Return whether a deployment's GPUs are shown; ``asked`` are services and the GPUs of a worker of each.

    False where no worker has a GPU, and where only real engines on a box without GPUs have (simulated) ones:
    they compute on the cores, and the GPUs only bound the number of workers.
    """
    holders = [name for name, gpus in asked if gpus]
    if any(not gpu.is_simulated for gpu in inventory):
        return bool(holders)
    return any(engine_of(section_options(config, name)) == SIMULATED for name in holders)


def shown_gpus(document: Document, config: Mapping[str, Mapping[str, Any]]) -> tuple[Gpu, ...]:
    """Return the GPUs of the deployment of a statefile, or none where they are not shown.

    A worker without a process may be one that waits for its GPUs.
    """
    inventory = inventory_of(document)
    asked = [
        (worker.component, worker.gpu_request or float(worker.role in SCALED_ROLES and not worker.pid))
        for worker in fleet_of(document)
    ]
    return inventory if shows_gpus(inventory, asked, config) else ()


def notes(
    gpus: Sequence[Gpu], claimed: Mapping[int, str], busy: Mapping[int, str], uses_busy: bool
) -> list[str]:
    """Return a line for each reason for which GPUs are left out, or, by ``--use-busy-gpus``, are not."""
    fate = "used all the same (--use-busy-gpus)" if uses_busy else "left out"
    lines = [f"{line}: left out" for line in by_reason(claimed, gpus)]
    return lines + [f"{line}: {fate}" for line in by_reason(busy, gpus)]


def gpu_map(
    graph: GraphSpec, config: Mapping[str, Mapping[str, Any]], gpus: int | None, use_busy_gpus: bool = False
) -> tuple[str, CapacityError | None]:
    """Return tables of the workers and the GPUs, for ``--dry-run``, and why they do not fit at this moment.

    Raises CapacityError when they would not fit either if nobody else had any of the GPUs.
    """
    inventory, _ = available_gpus(gpus)
    allocation.check_fits(graph, inventory, {})
    arbiter = process_table.identity_of(os.getpid())
    foreign = GpuClaims(NodeClaims(arbiter, graph.namespace), inventory).held_by_others()
    busy = in_use(inventory, foreign)
    lines = notes(inventory, foreign, busy, use_busy_gpus)
    unusable = foreign if use_busy_gpus else {**busy, **foreign}
    fault = None
    try:
        allocation.check_fits(graph, inventory, unusable)
    except CapacityError as error:
        fault = error
    named = {each.name: section_options(config, each.name).get("model") for each in graph.services}
    models = {
        name: Path(model).name if Path(model).is_absolute() else model
        for name, model in named.items()
        if isinstance(model, str)
    }
    asked = [(service.name, service.gpus) for service in graph.services]
    has_gpus = shows_gpus(inventory, asked, config)
    tables = allocation.gpu_map(graph, inventory, unusable, models, has_gpus=has_gpus)
    return "\n\n".join(["\n".join(lines), tables] if lines else [tables]), fault
