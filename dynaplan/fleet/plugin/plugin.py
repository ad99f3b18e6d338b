# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The fleet plugin: a process of its own beside the arbiter, started again by circus when it dies.

A thin shell: it gives the fleet keeper (``keeper.py``) its surroundings and the events of circus.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from circus.plugins import CircusPlugin

from dynaplan.fleet import local_host
from dynaplan.fleet.circus_client import REPLACE_EVENT, CircusClient
from dynaplan.fleet.heartbeat import PLUGIN_PULSE
from dynaplan.fleet.launch import LAUNCH_FILE, CurrentLaunch, Launch
from dynaplan.fleet.plugin.departures import Departures
from dynaplan.fleet.plugin.document import Statefile, present
from dynaplan.fleet.plugin.fleet_gpus import FleetGpus
from dynaplan.fleet.plugin.gpu_claims import GpuClaims
from dynaplan.fleet.plugin.gpu_memory import GpuMemory
from dynaplan.fleet.plugin.gpu_sharing import GpuSharing
from dynaplan.fleet.plugin.health import HealthWatch
from dynaplan.fleet.plugin.keeper import LOOK_EVERY_S, FleetKeeper
from dynaplan.fleet.plugin.kept_keys import KeyKeeper
from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.fleet.ports import DocumentStore
from dynaplan.fleet.upkeep.event_hook import ON_EVENT_VARIABLE, EventHook, EventWatch
from dynaplan.fleet.upkeep.stall_detector import StandstillWatch
from dynaplan.graph.lifecycle import Worker
from dynaplan.planner import factory
from dynaplan.process import process_table
from dynaplan.process.kernel import die_with_parent
from dynaplan.process.logfile import LogFile, configure_logging
from dynaplan.process.ports import Processes
from dynaplan.store import connections
from dynaplan.store.port import Store
from dynaplan.util import terminal
from dynaplan.util.clock import Clock, SystemClock
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

RECORDS_OF_A_LOOK = 10
"""The planner's last records in which one look finds its events: more than a planner writes meanwhile."""


@dataclass(frozen=True)
class AroundFleet:
    """All that keeping a fleet reaches outside of its process.

    ``oom_kills()`` counts the processes that the kernel has ended for lack of memory, and says where.
    ``say(line)`` tells the user, ``learn(key, seconds)`` remembers the duration of a start, ``beat()`` says
    that passes go on, ``reloaded()`` returns the configuration of a reload, None while it is that of
    ``serve``. ``wall_s`` is the wall clock, in seconds since 1970.
    """

    store: Store
    statefile: DocumentStore
    circus: CircusClient
    processes: Processes
    clock: Clock
    gpus: FleetGpus
    standstill: StandstillWatch
    oom_kills: Callable[[], tuple[int, str]]
    say: Callable[[str], None]
    learn: Callable[[str, float], None]
    beat: Callable[[], None]
    reloaded: Callable[[], dict[str, Any] | None]
    wall_s: Callable[[], float] = time.time


@dataclass(frozen=True)
class KeptFleet:
    """A fleet as one process keeps it, once ``keeper`` and ``keys`` run; ``link`` is to be closed."""

    keeper: FleetKeeper
    keys: KeyKeeper
    link: StoreLink


async def open_fleet(launch: Launch, around: AroundFleet, wake: asyncio.Event) -> KeptFleet:
    """Go on with the fleet that the statefile describes; a pass begins at once when ``wake`` is set."""
    circus, processes, clock = around.circus, around.processes, around.clock
    statefile = await Statefile.open(around.statefile, launch, circus, processes)
    found = await _found(statefile, circus, processes, clock)
    link = StoreLink(around.store, launch.namespace, wake)
    link.start()
    departures = Departures(
        launch,
        circus=circus,
        processes=processes,
        clock=clock,
        link=link,
        health=HealthWatch(link.is_answering, wake),
        standstill=around.standstill,
        oom_kills=around.oom_kills,
        say=around.say,
    )
    keeper = FleetKeeper(
        launch,
        found,
        statefile.workers if statefile.is_written else None,
        circus=circus,
        processes=processes,
        clock=clock,
        link=link,
        departures=departures,
        gpus=around.gpus,
        record=lambda workers: statefile.record(workers, around.reloaded()),
        say=around.say,
        learn=around.learn,
        beat=around.beat,
        kept=lambda: statefile.planner_keys,
        wake=wake,
    )
    return KeptFleet(keeper, KeyKeeper(link, statefile, around.say, around.wall_s), link)


async def _found(
    statefile: Statefile, circus: CircusClient, processes: Processes, clock: Clock
) -> tuple[Worker, ...]:
    """Return the workers as circus has them; what has ended is written down before it has answered."""
    statefile.note_gone(processes, clock.now_s())
    asking = asyncio.create_task(present(statefile.workers, circus, processes), name="asks circus")
    while not (await asyncio.wait({asking}, timeout=LOOK_EVERY_S))[0]:
        statefile.note_gone(processes, clock.now_s())
    return asking.result()


class FleetPlugin(CircusPlugin):
    """Owns the workers' watchers, the GPUs and the statefile of one deployment."""

    name = "fleet"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        die_with_parent(int(os.environ["DYNAPLAN_PARENT_PID"]))
        super().__init__(*arguments, **options)
        self._keeper: FleetKeeper | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tasks = BackgroundTasks()

    def initialize(self) -> None:
        """Connect, and begin to keep the fleet."""
        super().initialize()
        self.loop.add_callback(self._begin)

    def handle_recv(self, data: Any) -> None:
        """Take an event: the end of a process, a worker to replace, or a reason to look."""
        _, action, message = self.split_data(data)
        if self._keeper is None or action not in ("reap", "stop", REPLACE_EVENT):
            return
        event = self.load_message(message)
        if action == REPLACE_EVENT:  # the name in the topic is in lower case
            self._keeper.note_replacement(str(event["name"]))
        elif action == "reap" and event.get("exit_code") is not None:
            self._keeper.note_exit(int(event["process_pid"]), int(event["exit_code"]))
        else:
            self._wake.set()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._keep())
        self._task.add_done_callback(lambda _: self.loop.stop())

    async def _keep(self) -> None:
        launch = Launch.from_json((Path(os.environ["DYNAPLAN_RUNTIME_DIR"]) / LAUNCH_FILE).read_text())
        terminal = Terminal(launch.log_dir / f"{launch.plugin_name}.log")
        launches, heartbeats = CurrentLaunch(launch), local_host.heartbeats(launch.runtime_dir)
        clock = SystemClock()
        around = AroundFleet(
            store=connections.connect_store(),
            statefile=local_host.open_statefile(launch.statefile),
            circus=CircusClient(launch.circus_endpoint),
            processes=process_table,
            clock=clock,
            gpus=self._fleet_gpus(launch, clock),
            standstill=StandstillWatch(heartbeats.read, clock),
            oom_kills=local_host.oom_kills,
            say=terminal.say,
            learn=local_host.startup_times(launch.statefile).learn,
            beat=lambda: heartbeats.beat(PLUGIN_PULSE, LOOK_EVERY_S),
            reloaded=lambda: _reloaded(launches.now),
        )
        fleet = await open_fleet(launch, around, self._wake)
        self._keeper = keeper = fleet.keeper
        log.info("keeping %d workers", len(keeper.workers))
        self._tasks.spawn(fleet.keys.run(), "kept keys")
        if target := os.environ.get(ON_EVENT_VARIABLE):
            self._tasks.spawn(self._event_hook(target, launch, keeper, clock).run(), "event hook")
        await keeper.run()

    def _event_hook(self, target: str, launch: Launch, keeper: FleetKeeper, clock: Clock) -> EventHook:
        directory = launch.log_dir / "planner"
        records = partial(factory.recent_decisions, directory, RECORDS_OF_A_LOOK)
        return EventHook(
            target, launch.namespace, EventWatch(lambda: keeper.workers.values(), records), clock
        )

    def _fleet_gpus(self, launch: Launch, clock: Clock) -> FleetGpus:
        claims, share = local_host.gpu_claims(launch.arbiter, launch.namespace), launch.gpu_share
        sharing = GpuSharing(share, launch.graph, launch.gpus, claims, clock) if share else None
        return FleetGpus(launch.gpus, GpuClaims(claims, launch.gpus), self._gpu_memory(launch), sharing)

    def _gpu_memory(self, launch: Launch) -> GpuMemory | None:
        """Begin to follow the memory of the GPUs, unless what others use does not count."""
        if launch.uses_busy_gpus or not launch.gpus:
            return None
        memory = GpuMemory(launch.gpus, local_host.gpu_uses(launch.gpus), SystemClock(), self._wake)
        self._tasks.spawn(memory.run(), "GPU memory")
        return memory


def _reloaded(launch: Launch) -> dict[str, dict[str, Any]] | None:
    """Return the configuration of a reload, for the statefile; None while it is that of ``serve``."""
    return launch.config if launch.is_reloaded else None


class Terminal:
    """The terminal of ``serve``, for the few lines that the user must see; the rest is logged."""

    def __init__(self, log_path: Path) -> None:
        self._descriptor = os.dup(1)
        self._log_file = LogFile(log_path)
        self._log_file.redirect()
        configure_logging()

    def say(self, line: str) -> None:
        """Write to the terminal, if it is read, and to the log."""
        log.info("%s", line)
        self._log_file.turn_over_if_full()
        if not terminal.say(line, self._descriptor):
            log.debug("the terminal is gone, or nobody reads it")
