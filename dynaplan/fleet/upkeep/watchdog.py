# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The watchdog of ``serve``: checks that run once a second beside the arbiter.

Two of them are here: a fleet plugin that runs and does nothing is ended, and services of which no worker can
ever start are reported. Others watch what a deployment needs on the machine: ``directory_watch.py`` and
``server_watch.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.heartbeat import PLUGIN_PULSE, SERVE_PULSE, Heartbeats
from dynaplan.fleet.plugin.stall_detection import StallDetector
from dynaplan.fleet.readiness import RecordedWorkers
from dynaplan.fleet.rules.hopeless import cause, hopeless
from dynaplan.process.ports import Processes
from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
"""Time between two checks, in seconds, and between two heartbeats of ``serve``."""

PLUGIN_STALLED_S = 20.0
"""Silence beyond its interval after which the fleet plugin is ended, in seconds; circus starts it again."""

Check = Callable[[], Awaitable[None]]


class Watchdog:
    """Runs checks once a second until it is cancelled; one that fails is logged."""

    def __init__(self, checks: Sequence[Check], clock: Clock) -> None:
        self._checks = checks
        self._clock = clock

    async def run(self) -> None:
        """Run every check, once a second."""
        while True:
            for check in self._checks:
                try:
                    await check()
                except Exception:
                    log.exception("%s failed; it is tried again", getattr(check, "__qualname__", check))
            await self._clock.sleep(CHECK_EVERY_S)


class PluginWatchdog:
    """Beats for ``serve``, and kills a fleet plugin that lives but does nothing."""

    def __init__(
        self,
        arbiter: ServeArbiter,
        plugin_name: str,
        heartbeats: Heartbeats,
        processes: Processes,
        clock: Clock,
        report: Callable[[str], None],
    ) -> None:
        self._arbiter = arbiter
        self._plugin_name = plugin_name
        self._heartbeats = heartbeats
        self._processes = processes
        self._stalls = StallDetector(heartbeats, clock)
        self._report = report

    async def check(self) -> None:
        """Beat, and end the plugin when it has not beaten for too long."""
        self._heartbeats.beat(SERVE_PULSE, CHECK_EVERY_S)
        for pid in list(self._arbiter.get_watcher(self._plugin_name).processes):
            overdue_s = self._stalls.overdue_s(PLUGIN_PULSE, pid)
            if overdue_s > PLUGIN_STALLED_S:
                self._report(f"The fleet plugin stands still ({overdue_s:.0f} s): killed; it starts again.")
                self._processes.kill_group(pid, self._processes.identify(pid) or 0)


class FailureWatch:
    """Reports every service without hope, once, with the cause and its log; then calls ``lost()``."""

    def __init__(
        self,
        workers: RecordedWorkers,
        log_dir: Path,
        report: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._log_dir = log_dir
        self._report = report
        self._lost = lost
        self._reported: set[str] = set()

    async def check(self) -> None:
        """Check the workers as the fleet plugin has written them down."""
        found = hopeless(self._workers.read())
        for component, worker in found.items():
            if component not in self._reported:
                log = self._log_dir / f"{worker.name}.log"
                self._report(f"No {component} can start: {cause(worker)}\n    log: {log}")
        is_new = bool(found.keys() - self._reported)
        self._reported = set(found)
        if is_new:
            self._lost()
