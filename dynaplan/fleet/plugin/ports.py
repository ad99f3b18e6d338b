"""What the reconciler of a fleet reaches outside of its process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dynaplan.fleet.circus_client import CircusClient
from dynaplan.fleet.plugin.gpu_availability import GpuAvailability
from dynaplan.fleet.plugin.gpu_watch import GpuWatch
from dynaplan.fleet.startup_times import StartupTimes
from dynaplan.fleet.statefile_store import DocumentStore
from dynaplan.process.heartbeats import Heartbeats
from dynaplan.process.ports import Processes
from dynaplan.store.port import Store
from dynaplan.util.clock import Clock


class Terminal(Protocol):
    """The terminal of ``serve``. A line that nobody reads is lost: reporting neither blocks nor raises."""

    def report(self, line: str) -> None:
        """Show the user a line, and log it."""
        ...


@dataclass(frozen=True)
class FleetPorts:
    """The interfaces of one fleet; ``wall_clock`` returns seconds since 1970-01-01 UTC."""

    store: Store
    statefile: DocumentStore
    circus: CircusClient
    processes: Processes
    clock: Clock
    heartbeats: Heartbeats
    startup_times: StartupTimes
    gpus: GpuAvailability
    terminal: Terminal
    gpu_watch: GpuWatch | None = None
    wall_clock: Callable[[], float] = time.time
