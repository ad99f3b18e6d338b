# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The fleet plugin: a process of its own beside the arbiter, started again by circus when it dies.

It gives the reconciler (``reconciler.py``) its ports and the events of circus.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from circus.plugins import CircusPlugin

from dynaplan.contract.hook_events import DecisionEventSource
from dynaplan.contract.power_caps import parse_power_cap
from dynaplan.fleet.capped_limits import DeploymentCaps
from dynaplan.fleet.circus_client import REPLACE_EVENT, CircusClient
from dynaplan.fleet.event_hook import ON_EVENT_VARIABLE, EventHook, EventWatch
from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.gpu_devices import health_reader, power_limits, uses_reader
from dynaplan.fleet.launch import LAUNCH_FILE, Launch
from dynaplan.fleet.plugin.document import Statefile, present
from dynaplan.fleet.plugin.gpu_availability import GpuAvailability, GpuClaims, GpuMemory
from dynaplan.fleet.plugin.gpu_watch import GpuWatch
from dynaplan.fleet.plugin.key_persistence import KeyPersistence
from dynaplan.fleet.plugin.model_manager import ModelManager
from dynaplan.fleet.plugin.option_reloads import OptionReloads
from dynaplan.fleet.plugin.ports import FleetPorts
from dynaplan.fleet.plugin.power_capping import PowerCapping
from dynaplan.fleet.plugin.reconciler import RESYNC_S, Reconciler
from dynaplan.fleet.plugin.stall_detection import HealthPoll, StallDetector
from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.fleet.plugin.termination import Termination
from dynaplan.fleet.startup_times import StartupTimesFile
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.graph.lifecycle import Worker
from dynaplan.process import process_table
from dynaplan.process.heartbeats import HeartbeatFiles
from dynaplan.process.kernel import die_with_parent
from dynaplan.process.logfile import LogFile, configure_logging
from dynaplan.store import connections
from dynaplan.util import terminal
from dynaplan.util.clock import Clock, SystemClock
from dynaplan.util.errors import DynaplanError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenFleet:
    """A fleet as one process keeps it, once ``reconciler`` and ``keys`` run; ``link`` is to be closed."""

    reconciler: Reconciler
    keys: KeyPersistence
    link: StoreLink


async def open_fleet(launch: Launch, ports: FleetPorts, wake: asyncio.Event) -> OpenFleet:
    """Continue with the fleet that the statefile describes; a pass begins at once when ``wake`` is set."""
    statefile = await Statefile.open(ports.statefile, launch, ports.circus, ports.processes)
    found = await _present(statefile, ports)
    link = StoreLink(ports.store, launch.namespace, wake)
    link.start()
    health = HealthPoll(link.is_answering, wake)
    stalls = StallDetector(ports.heartbeats, ports.clock)
    termination = Termination(launch, ports, link, health, stalls)
    models = ModelManager(launch, ports.startup_times, statefile, link)
    if models.deployed.models:
        link.follow_demand()
    reconciler = Reconciler(launch, ports, statefile, link, termination, found, wake, models)
    return OpenFleet(reconciler, KeyPersistence(link, statefile, ports.terminal, ports.wall_clock), link)


async def _present(statefile: Statefile, ports: FleetPorts) -> tuple[Worker, ...]:
    """Return the workers as circus has them; while circus does not answer, ends are still written down."""
    statefile.record_ends(ports.processes, ports.clock.now_s())
    asking = asyncio.create_task(
        present(statefile.workers, ports.circus, ports.processes), name="asks circus"
    )
    while not (await asyncio.wait({asking}, timeout=RESYNC_S))[0]:
        statefile.record_ends(ports.processes, ports.clock.now_s())
    return asking.result()


class ReconcilerPlugin(CircusPlugin):
    """Owns the workers' watchers, the GPUs and the statefile of one deployment."""

    name = "fleet"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        die_with_parent(int(os.environ["DYNAPLAN_PARENT_PID"]))
        super().__init__(*arguments, **options)
        self._reconciler: Reconciler | None = None
        self._early_events: list[tuple[str, Mapping[str, Any]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()

    def initialize(self) -> None:
        super().initialize()
        self.loop.add_callback(self._begin)

    def handle_recv(self, data: Any) -> None:
        """Take an event: the end of a process, a worker to replace, or a reason for a pass."""
        _, action, message = self.split_data(data)
        if action in ("reap", "stop", REPLACE_EVENT):
            self._take(action, self.load_message(message))

    def pass_events_to(self, reconciler: Reconciler) -> None:
        """Pass on the events from now on, and before them those that came while the fleet was being opened:
        nobody tells an exit code twice."""
        self._reconciler = reconciler
        for action, event in self._early_events:
            self._take(action, event)
        self._early_events.clear()

    def _take(self, action: str, event: Mapping[str, Any]) -> None:
        if self._reconciler is None:
            self._early_events.append((action, event))
        elif action == REPLACE_EVENT:  # the name in the topic is in lower case
            self._reconciler.request_replacement(str(event["name"]))
        elif action == "reap" and event.get("exit_code") is not None:
            self._reconciler.record_exit(int(event["process_pid"]), int(event["exit_code"]))
        else:
            self._wake.set()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(lambda _: self.loop.stop())

    async def _run(self) -> None:
        launch = Launch.from_json((Path(os.environ["DYNAPLAN_RUNTIME_DIR"]) / LAUNCH_FILE).read_text())
        limits = DeploymentCaps(launch.statefile)
        ports = self._ports(launch, limits)
        fleet = await open_fleet(launch, ports, self._wake)
        reconciler = fleet.reconciler
        self.pass_events_to(reconciler)
        log.info("reconciling %d workers", len(reconciler.workers))
        self._tasks.spawn(record_earlier_exits(ports.circus, reconciler), "earlier exit codes")
        self._tasks.spawn(fleet.keys.run(), "key persistence")
        self._tasks.spawn(OptionReloads(launch.namespace, fleet.link).run(), "options of engines")
        self._tasks.spawn(_power_capping(launch, limits, ports).run(), "power caps")
        if target := os.environ.get(ON_EVENT_VARIABLE):
            hook = self._event_hook(target, launch, reconciler, ports.clock)
            self._tasks.spawn(hook.run(), "event hook")
        await reconciler.run()

    def _ports(self, launch: Launch, limits: DeploymentCaps) -> FleetPorts:
        return FleetPorts(
            terminal=ServeTerminal(launch.log_dir / f"{launch.plugin_name}.log"),  # first: it takes the log
            store=connections.connect_store(),
            statefile=StatefileStore(launch.statefile),
            circus=CircusClient(launch.circus_endpoint),
            processes=process_table,
            clock=SystemClock(),
            heartbeats=HeartbeatFiles.of(launch.runtime_dir),
            startup_times=StartupTimesFile.beside(launch.statefile),
            gpus=self._gpu_availability(launch),
            gpu_watch=self._gpu_watch(launch, limits),
        )

    def _event_hook(self, target: str, launch: Launch, reconciler: Reconciler, clock: Clock) -> EventHook:
        decisions = self.decision_events(launch.log_dir / "planner")
        watch = EventWatch(
            lambda: reconciler.workers.values(),
            decisions,
            lambda: tuple(reconciler.model_events),
            lambda: tuple(reconciler.gpu_events),
        )
        return EventHook(target, launch.namespace, watch, clock)

    def decision_events(self, planner_dir: Path) -> DecisionEventSource:
        """Return the events among the decisions that planners have recorded there."""
        raise NotImplementedError

    def _gpu_availability(self, launch: Launch) -> GpuAvailability:
        claims = NodeClaims(launch.arbiter, launch.namespace)
        return GpuAvailability(launch.gpus, GpuClaims(claims, launch.gpus), self._gpu_memory(launch))

    def _gpu_watch(self, launch: Launch, limits: DeploymentCaps) -> GpuWatch | None:
        """Begin to watch the health of the GPUs; None where the deployment has none."""
        if not launch.gpus:
            return None
        watch = GpuWatch(health_reader(launch.gpus), SystemClock(), lambda: limits.indices)
        self._tasks.spawn(watch.run(self._wake), "GPU health")
        return watch

    def _gpu_memory(self, launch: Launch) -> GpuMemory | None:
        """Begin to follow the memory of the GPUs; None without GPUs, and with ``--use-busy-gpus``."""
        if launch.uses_busy_gpus or not launch.gpus:
            return None
        memory = GpuMemory(launch.gpus, uses_reader(launch.gpus), SystemClock(), self._wake)
        self._tasks.spawn(memory.run(), "GPU memory")
        return memory


async def record_earlier_exits(circus: CircusClient, reconciler: Reconciler) -> None:
    """Have the reconciler know how processes ended lately: circus told that before this process listened."""
    with suppress(DynaplanError):  # circus is busy; a crash without its exit code is a crash all the same
        for pid, exit_code in (await circus.exit_codes()).items():
            reconciler.record_exit(pid, exit_code)


def _power_capping(launch: Launch, limits: DeploymentCaps, ports: FleetPorts) -> PowerCapping:
    return PowerCapping(
        tuple(map(parse_power_cap, launch.power_caps)),
        launch.gpus,
        power_limits(launch.gpus),
        limits,
        ports.terminal,
        _local_minute,
        ports.clock,
    )


def _local_minute(at_s: float) -> int:
    local = time.localtime(at_s)
    return local.tm_hour * 60 + local.tm_min


class ServeTerminal:
    """The terminal of ``serve``, for the few lines that the user must see; the rest is logged."""

    def __init__(self, log_path: Path) -> None:
        self._descriptor = os.dup(1)
        self._log_file = LogFile(log_path)
        self._log_file.redirect()
        configure_logging()

    def report(self, line: str) -> None:
        """Write to the terminal, if it is read, and to the log."""
        log.info("%s", line)
        self._log_file.turn_over_if_full()
        if not terminal.try_write_line(line, self._descriptor):
            log.debug("the terminal is gone, or nobody reads it")
