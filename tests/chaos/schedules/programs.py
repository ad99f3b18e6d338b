"""The programs of a simulated machine: the fleet plugin, and the workers of a disaggregated graph.

Each is put together as its own ``main`` does it (``fleet/plugin/plugin.py``, ``worker/main.py``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, cast
from unittest.mock import patch

from dynaplan.config.service_config import ServiceConfig, section_options
from dynaplan.contract.gpus import Gpu
from dynaplan.events.port import Messenger
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.plugin.gpu_availability import GpuAvailability, GpuClaims
from dynaplan.fleet.plugin.plugin import open_fleet
from dynaplan.fleet.plugin.ports import FleetPorts
from dynaplan.fleet.plugin.reconciler import Reconciler
from dynaplan.gateway.prefill.remote_prefill import RemotePrefill
from dynaplan.gateway.server import start_frontend
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.http import request_ids
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.discovery import Discovery
from dynaplan.worker.engine_worker import start_decode_worker, start_prefill_worker
from dynaplan.worker.lifecycle import HostedService, WorkerLifecycle
from dynaplan.worker.prefill_puller import PrefillPuller
from dynaplan.worker.server import WorkerServer
from dynaplan.worker.worker_runtime import WorkerRuntime
from tests.chaos.history import answers
from tests.chaos.schedules.engines import ServedEngine
from tests.chaos.schedules.lines import MessengerLine, StoreLine
from tests.chaos.schedules.machine import Machine
from tests.chaos.schedules.network import PUBLIC_PORT, MemorySocket
from tests.chaos.schedules.virtual_time import PROCESS, Process
from tests.fakes.circus import FakeClaims, FakeHeartbeats, FakeStartupTimes
from tests.fakes.clock import LoopClock

NAMESPACE = "ns"
TOKEN = "a-token"
MODEL = "a/model"
GPUS = 6
FRONTENDS = 2
LEAVE_S = 8.0
"""Seconds that a worker may take to leave: shorter than the longest answers."""

GRAPH = GraphSpec(
    "graphs.disagg:Frontend",
    "/",
    NAMESPACE,
    (
        ServiceSpec("Frontend", Role.FRONTEND, workers=FRONTENDS),
        ServiceSpec("VllmWorker", Role.DECODE, gpus=1),
        ServiceSpec("PrefillWorker", Role.PREFILL, gpus=1),
    ),
)


def configuration(dice: Random) -> dict[str, dict[str, Any]]:
    """The configuration of one deployment."""
    engine = {"engine": "sim", "model": MODEL, "startup-time": dice.choice([0.2, 1.0, 3.0])}
    engine |= {"drain-deadline": LEAVE_S, "health-timeout": dice.choice([5.0, 15.0]), "jitter": 0.2}
    engine |= {"speedup-ratio": 0.05}
    frontend = {
        "page": False,
        "model": MODEL,
        "router": dice.choice(["round-robin", "random", "least-loaded", "kv"]),
        "no-kv-events": True,
        "worker-wait": 15.0,
        "prefill-wait": dice.choice([4.0, 12.0]),
        "remote-prefill": True,
        "conditional-disagg": True,
        "max-local-prefill-length": 30,
        "max-prefill-queue-size": dice.choice([2, 20]),
    }
    return {"Frontend": frontend, "VllmWorker": dict(engine), "PrefillWorker": dict(engine)}


def launch_of(config: dict[str, dict[str, Any]]) -> Launch:
    nowhere = Path("/nonexistent")
    return Launch(
        graph=GRAPH,
        gpus=tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(GPUS)),
        arbiter=ProcessIdentity(1, 1, "boot"),
        config=config,
        runtime_dir=nowhere,
        log_dir=nowhere,
        statefile=nowhere,
        circus_endpoint="ipc:///none",
        circus_events="ipc:///none",
        host="127.0.0.1",
        port=PUBLIC_PORT,
        scratch_dir=nowhere,
        leave_timeout_s=LEAVE_S,
    )


class Plugin:
    """The fleet plugin's process."""

    def __init__(self, machine: Machine, launch: Launch) -> None:
        self.machine = machine
        self.launch = launch
        self.reconciler: Reconciler | None = None
        machine.plugin = self
        self.process = machine.spawn("FleetPlugin", self._run)

    async def _run(self, process: Process) -> int:
        machine, launch = self.machine, self.launch
        self.line = StoreLine(machine.store, process)
        ports = FleetPorts(
            store=cast(Any, self.line),
            statefile=cast(Any, machine.statefile),
            circus=cast(Any, machine.circus),
            processes=machine,
            clock=LoopClock(),
            heartbeats=FakeHeartbeats(),
            startup_times=FakeStartupTimes(),
            gpus=GpuAvailability(launch.gpus, GpuClaims(FakeClaims(), launch.gpus), None),
            terminal=self,
            wall_clock=wall_s,
        )
        fleet = await open_fleet(launch, ports, asyncio.Event())
        self.reconciler = fleet.reconciler
        keys = asyncio.create_task(fleet.keys.run())
        try:
            await self.reconciler.run()
        finally:
            keys.cancel()
            await fleet.link.close()
        return 0

    def report(self, line: str) -> None:
        self.machine.tell(f"  plugin: {line}")


class WorkerProgram:
    """A worker's process, as ``dynaplan.worker.main`` makes one."""

    def __init__(self, machine: Machine, name: str, service: str, gpus: tuple[str, ...]) -> None:
        self.machine = machine
        self.service = service
        self.runtime: WorkerRuntime | None = None
        self.draining_since_s = 0.0
        self.leave_why = ""
        self.process = machine.spawn(name, self._run, gpus)
        machine.workers[self.process.pid] = self

    def leave(self, why: str) -> None:
        """SIGTERM, which a process that is not that far yet ends by."""
        self.leave_why = why
        if self.runtime:
            self.runtime.leave(why)

    async def _run(self, process: Process) -> int:
        machine = self.machine
        server = WorkerServer(cast(Any, machine.network.new_socket()), TOKEN)
        self.line = line = StoreLine(machine.store, process)
        discovery = Discovery(cast(Any, line), NAMESPACE)
        await discovery.start()
        self.runtime = runtime = self._runtime(process, server.url, discovery)
        if self.leave_why:
            return -15
        runtime.spawn(discovery.wait_failed(), "discovery")
        deadline_s = float(runtime.settings.get("drain-deadline", LEAVE_S))
        lifecycle = WorkerLifecycle(runtime, server, lambda: server, deadline_s, has_signals=False)
        try:
            return await lifecycle.run(self._prepare)
        finally:
            await runtime.close()
            await discovery.close()
            await line.close()

    def _runtime(self, process: Process, url: str, discovery: Discovery) -> WorkerRuntime:
        machine, line = self.machine, cast(Any, self.line)

        async def connect() -> Messenger:
            return cast(Any, MessengerLine(machine.messenger, process, machine.dice))

        role = next(each.role for each in GRAPH.services if each.name == self.service)
        runtime = WorkerRuntime(
            namespace=NAMESPACE,
            component=self.service,
            worker_name=process.name,
            worker_token=TOKEN,
            url=url,
            store=line,
            clock=LoopClock(),
            discovery=discovery,
            settings=section_options(ServiceConfig.get_instance(), self.service),
            connect_messenger=connect,
            gpus=len(process.gpus),
            role=role,
        )
        if self.service == "Frontend":
            runtime.public_socket = cast(Any, MemorySocket(PUBLIC_PORT))
        return runtime

    async def _prepare(self) -> HostedService:
        runtime = self.runtime
        assert runtime
        if self.service == "Frontend":
            await start_frontend(runtime)
        elif self.service == "VllmWorker":
            await start_decode_worker(runtime)
        else:
            await start_prefill_worker(runtime)
        return HostedService(registered=("generate",))


def wall_s() -> float:
    """The machine's wall clock, which can jump."""
    loop = asyncio.get_running_loop()
    machine = getattr(loop, "machine", None)
    return 1.7e9 + loop.time() + (machine.skew_s if machine else 0.0)


def own_pid() -> int:
    process = PROCESS.get()
    return process.pid if process else 1


@contextmanager
def installed(machine: Machine, config: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Have the programs see this machine: its clock, its pids, its network, their configuration."""
    cast(Any, machine.loop).machine = machine
    seeds = iter(range(1_000_000))
    first = machine.dice.randrange(2**31)

    def wall_now() -> float:
        with suppress(RuntimeError):
            return wall_s()
        return 1.7e9

    with ExitStack() as stack:
        stack.enter_context(machine.network.installed())
        stack.enter_context(patch("dynaplan.worker.lifecycle.os.getpid", own_pid))
        stack.enter_context(patch("time.time", wall_now))
        stack.enter_context(patch("os.urandom", machine.dice.randbytes))
        if machine.dice.random() < 0.5:
            make = partial(ServedEngine, machine)
            stack.enter_context(
                patch("dynaplan.engines.registry.make_engine", lambda name, *arguments: make(*arguments))
            )
        stack.enter_context(patch.object(request_ids, "_RANDOM", Random(first)))
        stack.enter_context(
            patch("dynaplan.gateway.routing.worker_router.Random", lambda: Random(first + next(seeds)))
        )
        stack.enter_context(patch("dynaplan.engines.sim.openai_endpoints.AnswerText", answers))
        stack.enter_context(patch.dict(RemotePrefill.__init__.__kwdefaults__, wall_s=wall_now))
        defaults = PrefillPuller.__init__.__defaults__
        PrefillPuller.__init__.__defaults__ = (*(defaults or ())[:-1], wall_now)
        stack.callback(setattr, PrefillPuller.__init__, "__defaults__", defaults)
        stack.enter_context(patch.object(ServiceConfig, "_instance", ServiceConfig(config)))
        yield
