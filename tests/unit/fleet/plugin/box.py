"""A fleet keeper and everything around it, in memory, for the tests of this directory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from dynaplan.fleet.desired_counts import DesiredCounts
from dynaplan.fleet.gpus import Gpu
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.plugin.departures import Departures
from dynaplan.fleet.plugin.fleet_gpus import FleetGpus
from dynaplan.fleet.plugin.gpu_claims import GpuClaims
from dynaplan.fleet.plugin.gpu_memory import GpuMemory
from dynaplan.fleet.plugin.gpu_sharing import GpuSharing
from dynaplan.fleet.plugin.keeper import FleetKeeper
from dynaplan.fleet.ports import Claims
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.instances import Instance
from dynaplan.util.errors import StatefileUnwritable
from tests.fakes.circus import FakeCircus, FakeClaims, FakeHealth, FakeLink, FakeProcesses, FakeStandstill

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


class Box:
    """A keeper and everything around it, in the hands of the test."""

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
        self.health = FakeHealth()
        self.standstill = FakeStandstill()
        self.oom_kills = 3
        self.kept: dict[str, str] = {}
        self.processes = FakeProcesses(self.circus)
        self.said: list[str] = []
        self.written: tuple[Worker, ...] = workers
        self.is_disk_full = False
        self.frozen: set[str] = set()
        self.learnt: list[tuple[str, float]] = []
        self.wake = asyncio.Event()
        self.memory: GpuMemory | None = None
        self.sharing: GpuSharing | None = None
        self.keeper = self.new_keeper()

    def new_keeper(self, found: Sequence[Worker] | None = None) -> FleetKeeper:
        """A keeper that knows what was written down, and what it ``found`` where that is something else."""
        self.keeper = FleetKeeper(
            self.launch,
            self.written if found is None else found,
            self.written,
            circus=cast(Any, self.circus),
            processes=self.processes,
            clock=self,
            link=cast(Any, self.link),
            departures=self.departures(),
            gpus=FleetGpus(
                self.launch.gpus, GpuClaims(self.claims, self.launch.gpus), self.memory, self.sharing
            ),
            record=self.record,
            say=self.said.append,
            learn=lambda key, seconds: self.learnt.append((key, seconds)),
            beat=lambda: None,
            kept=lambda: self.kept,
            wake=self.wake,
        )
        return self.keeper

    def departures(self) -> Departures:
        return Departures(
            self.launch,
            circus=cast(Any, self.circus),
            processes=self.processes,
            clock=self,
            link=cast(Any, self.link),
            health=cast(Any, self.health),
            standstill=cast(Any, self.standstill),
            oom_kills=lambda: (self.oom_kills, "this machine"),
            say=self.said.append,
        )

    def now_s(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    def record(self, workers: Sequence[Worker]) -> None:
        if self.is_disk_full:
            raise StatefileUnwritable("no space left on device")
        self.written = tuple(workers)

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
            for worker in self.keeper.workers.values()
            if self.processes.identify(worker.pid) and worker.name not in self.frozen
        )

    async def settle(self, passes: int = 4) -> None:
        for _ in range(passes):
            await self.keeper.one_pass()
            self.register()

    def states(self) -> dict[str, str]:
        return {name: worker.state.value for name, worker in self.keeper.workers.items()}

    async def started(self, decode: int = 1, prefill: int = 1) -> Box:
        self.link.counts = DesiredCounts(prefill, decode, 0)
        await self.settle()
        return self


async def frozen(box: Box, name: str) -> Worker:
    """A worker that was ready, and whose lease has lapsed."""
    box.frozen.add(name)
    box.register()
    await box.keeper.one_pass()
    return box.keeper.workers[name]
