# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The watch over the data of embedded servers: a server that does not start with its data starts without.

What etcd and NATS keep for a deployment is written anew when it is lost: registrations by the workers, the
planner's keys from the statefile, streams by their users. A server that does not start would end all that.
A full disk looks the same as damaged data, and is looked for first.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence

from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.servers.data_room import moved_into_memory
from dynaplan.fleet.servers.embedded import ServerSpec

log = logging.getLogger(__name__)

FAILED_STARTS = 3
"""The number of processes in a row that ended before they answered, after which the data is set aside."""

SET_ASIDE = ".damaged"


class ServerWatch:
    """Watches one embedded server. ``report(line)`` shows the user a line."""

    def __init__(
        self, launch: Launch, server: ServerSpec, arbiter: ServeArbiter, report: Callable[[str], None]
    ) -> None:
        self._watcher = f"{launch.namespace}_{server.name}"
        self._log = launch.log_dir / f"{self._watcher}.log"
        self._server = server
        self._scratch_dir = launch.scratch_dir
        self._arbiter = arbiter
        self._report = report
        self._answered = 0
        self._failed: set[int] = set()

    async def check(self) -> None:
        """Check once: count the processes that have not answered, and set the data aside after three."""
        pid = next(iter(self._arbiter.get_watcher(self._watcher).processes), 0)
        if pid and pid == self._answered:
            return
        if pid and await self._server.is_ready():
            self._answered = pid
            self._failed.clear()
            return
        if pid:
            self._failed.add(pid)
        # The present one may still be on its way.
        if len(self._failed - {pid}) >= FAILED_STARTS:
            self._failed.clear()
            self._make_startable()

    def _make_startable(self) -> None:
        if line := moved_into_memory(self._server, self._scratch_dir):
            self._arbiter.kill_process_of(self._watcher)
            self._report(line)
        else:
            self._set_aside()

    def _set_aside(self) -> None:
        data = (self._server.working_dir / self._server.data).resolve()
        if not data.exists():
            return
        aside = data.with_name(data.name + SET_ASIDE)
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(data, aside)
        if data != self._server.working_dir / self._server.data:
            data.mkdir(mode=0o700)
        self._arbiter.kill_process_of(self._watcher)
        self._report(
            f"{self._server.name} does not start with its data, which is damaged: set aside as {aside}. "
            f"It starts with new data, and what was there is written again. Log: {self._log}"
        )


def server_watches(
    launch: Launch, servers: Sequence[ServerSpec], arbiter: ServeArbiter, report: Callable[[str], None]
) -> list[ServerWatch]:
    """Return a watch for each server that has data."""
    return [ServerWatch(launch, server, arbiter, report) for server in servers if server.data]
