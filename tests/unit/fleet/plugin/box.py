"""A reconciler and everything around it, in memory, for the tests of this directory."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dynaplan.contract.gpus import Gpu
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.fleet.gpu_claims import Claims
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.plugin.gpu_availability import GpuAvailability, GpuClaims, GpuMemory
from dynaplan.fleet.plugin.model_manager import ModelManager
from dynaplan.fleet.plugin.ports import FleetPorts
from dynaplan.fleet.plugin.reconciler import Reconciler
from dynaplan.fleet.plugin.termination import Termination
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.models.model import Learnt
from dynaplan.models.shared_memory import HostMemory
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.memory import BoxMemory
from dynaplan.process.worker_memory import HeldMemory
from dynaplan.store.instances import Instance
from dynaplan.util.errors import StatefileUnwritable
from tests.fakes.circus import (
    FakeCircus,
    FakeClaims,
    FakeHealthPoll,
    FakeHeartbeats,
    FakeLink,
    FakeProcesses,
    FakeStallDetector,
    FakeStartupTimes,
    FakeTerminal,
)

GRAPH = GraphSpec(
    "graphs.disagg:Frontend",
    "/srv/project",
    "ns",
    (
        ServiceSpec("Frontend", Role.FRONTEND),
        ServiceSpec("VllmWorker", Role.DECODE, gpus=1),
        ServiceSpec("PrefillWorker", Role.PREFILL, gpus=1),
    ),
)


class MemoryStatefile:
    """The statefile of the reconciler: the workers that were last written; the disk can be full."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = tuple(workers)
        self.planner_keys: dict[str, str] = {}
        self.learnt: dict[str, Learnt] = {}
        self.is_disk_full = False

    def has(self, workers: Mapping[str, Worker]) -> bool:
        return {each.name: each for each in self.workers} == workers

    def record_learnt(self, learnt: Mapping[str, Learnt]) -> None:
        self.learnt = dict(learnt)

    def record(self, workers: Iterable[Worker]) -> None:
        if self.is_disk_full:
            raise StatefileUnwritable("no space left on device")
        self.workers = tuple(workers)


class Box:
    """A reconciler and everything around it, in the hands of the test."""

    def __init__(self, directory: Path, *workers: Worker, foreign: Sequence[str] = ()) -> None:
        self.launch = Launch(
            graph=GRAPH,
            gpus=tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(4)),
            arbiter=ProcessIdentity(1, 1, "boot"),
            config={"VllmWorker": {"model": "some/model", "health-timeout": 5}},
            runtime_dir=directory,
            log_dir=directory,
            statefile=directory / "ns.json",
            circus_endpoint="ipc:///none",
            circus_events="ipc:///none",
            host="127.0.0.1",
            port=8000,
            scratch_dir=directory / "scratch",
            leave_timeout_s=10,
        )
        self.now = 100.0
        self.circus, self.link = FakeCircus(), FakeLink()
        self.claims: Claims = FakeClaims(*foreign)
        self.health, self.stalls = FakeHealthPoll(), FakeStallDetector()
        self.processes = FakeProcesses(self.circus)
        self.terminal, self.startup_times = FakeTerminal(), FakeStartupTimes()
        self.statefile = MemoryStatefile(workers)
        self.frozen: set[str] = set()
        self.wake = asyncio.Event()
        self.memory: GpuMemory | None = None
        self.host, self.held = BoxMemory(16 * 2**30, 12 * 2**30), HeldMemory()
        self.reconciler = self.new_reconciler()

    def new_reconciler(self, found: Sequence[Worker] | None = None) -> Reconciler:
        """A reconciler that begins with what was written down, or with what was ``found``."""
        ports = FleetPorts(
            store=cast(Any, None),
            statefile=cast(Any, None),
            circus=cast(Any, self.circus),
            processes=self.processes,
            clock=self,
            heartbeats=FakeHeartbeats(),
            startup_times=self.startup_times,
            gpus=GpuAvailability(self.launch.gpus, GpuClaims(self.claims, self.launch.gpus), self.memory),
            terminal=self.terminal,
        )
        link, statefile = cast(Any, self.link), cast(Any, self.statefile)
        health, stalls = cast(Any, self.health), cast(Any, self.stalls)
        termination = Termination(self.launch, ports, link, health, stalls)
        workers = self.statefile.workers if found is None else found
        models = ModelManager(self.launch, self.startup_times, statefile, link, self.read_host)
        self.reconciler = Reconciler(
            self.launch, ports, statefile, link, termination, workers, self.wake, models
        )
        return self.reconciler

    def read_host(self, pids: Collection[int]) -> HostMemory:
        held, box = self.held, self.host
        resident_bytes = dict.fromkeys(pids, held.resident_bytes)
        return HostMemory(box.total_bytes, box.available_bytes, resident_bytes, len(pids) * held.own_bytes)

    @property
    def written(self) -> tuple[Worker, ...]:
        return self.statefile.workers

    @written.setter
    def written(self, workers: tuple[Worker, ...]) -> None:
        self.statefile.workers = workers

    @property
    def said(self) -> list[str]:
        return self.terminal.lines

    def now_s(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def register(self) -> None:
        """Every process registers, and only those that run stay registered."""
        self.link.instances = tuple(
            Instance(
                "ns",
                worker.component,
                "generate",
                worker.pid + 1000,
                f"http://127.0.0.1:{worker.pid}",
                worker.name,
                worker.pid,
            )
            for worker in self.reconciler.workers.values()
            if self.processes.identify(worker.pid) and worker.name not in self.frozen
        )

    async def settle(self, passes: int = 4) -> None:
        for _ in range(passes):
            await self.reconciler.reconcile_once()
            self.register()

    def states(self) -> dict[str, str]:
        return {name: worker.state.value for name, worker in self.reconciler.workers.items()}

    async def started(self, decode: int = 1, prefill: int = 1) -> Box:
        self.link.counts = DesiredCounts(prefill, decode, 0)
        await self.settle()
        return self


async def frozen(box: Box, name: str) -> Worker:
    """A worker that was ready, and whose lease has lapsed."""
    box.frozen.add(name)
    box.register()
    await box.reconciler.reconcile_once()
    return box.reconciler.workers[name]
