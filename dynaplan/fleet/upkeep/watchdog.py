# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The vigil of ``serve``: its own heartbeat, and the end of a fleet plugin that stands still."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.heartbeat import PLUGIN_PULSE, SERVE_PULSE, Heartbeats
from dynaplan.fleet.upkeep.stall_detector import StandstillWatch
from dynaplan.process.ports import Processes
from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Time between two looks, in seconds, and between two heartbeats of ``serve``."""

PLUGIN_STANDS_STILL_S = 20.0
"""Silence beyond its interval after which the fleet plugin is ended, in seconds; circus starts it again."""

Task = Callable[[], Awaitable[None]]


class Vigil:
    """Looks after the deployment once a second until it is cancelled; a task that fails is logged."""

    def __init__(self, tasks: Sequence[Task], clock: Clock) -> None:
        self._tasks = tasks
        self._clock = clock

    async def keep(self) -> None:
        """Run every task, once a second."""
        while True:
            for task in self._tasks:
                try:
                    await task()
                except Exception:
                    log.exception("%s failed; it is tried again", getattr(task, "__qualname__", task))
            await self._clock.sleep(LOOK_EVERY_S)


class PluginWatch:
    """Beats for ``serve``, and kills a fleet plugin that lives but does nothing."""

    def __init__(
        self,
        arbiter: ServeArbiter,
        plugin_name: str,
        heartbeats: Heartbeats,
        processes: Processes,
        clock: Clock,
        say: Callable[[str], None],
    ) -> None:
        self._arbiter = arbiter
        self._plugin_name = plugin_name
        self._heartbeats = heartbeats
        self._processes = processes
        self._standstill = StandstillWatch(heartbeats.read, clock)
        self._say = say

    async def look(self) -> None:
        """Beat, and end the plugin when it has not beaten for too long."""
        self._heartbeats.beat(SERVE_PULSE, LOOK_EVERY_S)
        for pid in list(self._arbiter.get_watcher(self._plugin_name).processes):
            overdue_s = self._standstill.overdue_s(PLUGIN_PULSE, pid)
            if overdue_s > PLUGIN_STANDS_STILL_S:
                self._say(f"The fleet plugin stands still ({overdue_s:.0f} s): killed; it starts again.")
                self._processes.kill_group(pid, self._processes.identify(pid) or 0)
