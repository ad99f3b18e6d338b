"""Graphs and GPUs that the tests of this directory share."""

from __future__ import annotations

from dynaplan.contract.gpus import Gpu
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec

READY, STARTING, DRAINING = WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING
BACKOFF, FAILED, STOPPED = WorkerState.BACKOFF, WorkerState.FAILED, WorkerState.STOPPED


def box(gpus: int) -> tuple[Gpu, ...]:
    return tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(gpus))


def graph(*services: ServiceSpec) -> GraphSpec:
    return GraphSpec("graphs.disagg:Frontend", "/srv/project", "dynamo", services)


def decode(workers: int = 1, gpus: float = 1) -> ServiceSpec:
    return ServiceSpec("VllmWorker", Role.DECODE, workers, gpus)


def prefill(workers: int = 1, gpus: float = 1) -> ServiceSpec:
    return ServiceSpec("PrefillWorker", Role.PREFILL, workers, gpus)


def worker(name: str, state: WorkerState = READY, gpus: tuple[int, ...] = (), share: float = 1.0) -> Worker:
    component = "PrefillWorker" if "Prefill" in name else "VllmWorker"
    role = Role.PREFILL if "Prefill" in name else Role.DECODE
    return Worker(f"dynamo_{name}", component, role, state, gpus=gpus, gpu_share=share)
