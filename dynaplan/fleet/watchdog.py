# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The watchdog of ``serve``: checks that run every two seconds beside the arbiter.

1. ``PluginWatchdog``: a fleet plugin that runs and does nothing is ended.
2. ``FailureWatch``: services of which no worker can ever start are reported.
3. ``DirectoryWatch``: what vanishes of the deployment's directories is reported and made again. Three
   things may be taken away under a running deployment: the short link to the runtime directory (a logout, a
   cleaner of temporary files), sockets in it, and the directory itself. Connections that are open go on in
   all three cases; without this watch the next one would fail.
4. ``ServerWatch``: an embedded server that does not start with its data starts without. What etcd and NATS
   keep for a deployment is written anew when it is lost: registrations by the workers, the planner's keys
   from the statefile, streams by their users. A server that does not start would end all that. A full disk
   looks the same as damaged data, and is checked first.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from dynaplan.contract.absence import cause, unstartable_services
from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.launch import RELOADED_FILE, Launch
from dynaplan.fleet.plugin.stall_detection import StallDetector
from dynaplan.fleet.readiness import RecordedWorkers
from dynaplan.fleet.runtime_dir import ensure_link, make_private_directory, write_private
from dynaplan.fleet.servers import ServerSpec, move_data_into_memory
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, Heartbeats
from dynaplan.process.ports import Processes
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
"""Time between two checks, in seconds, and between two heartbeats of ``serve``."""

PLUGIN_STALLED_S = 20.0
"""Silence beyond its interval after which the fleet plugin is ended, in seconds; circus starts it again."""

Check = Callable[[], Awaitable[None]]


@asynccontextmanager
async def watching(checks: Sequence[Check], clock: Clock) -> AsyncIterator[None]:
    """Run the checks every CHECK_EVERY_S, inside an ``async with`` block; one that fails is logged."""

    async def check_all() -> None:
        while True:
            # One after the other: a check that never returns stops the beats as well, and the supervisor
            # ends this process.
            for check in checks:
                try:
                    await check()
                except Exception:
                    log.exception("%s failed; it is tried again", getattr(check, "__qualname__", check))
            await clock.sleep(CHECK_EVERY_S)

    task = asyncio.create_task(check_all(), name="watchdog")
    try:
        yield
    finally:
        task.cancel()


class PluginWatchdog:
    """Kills a fleet plugin that lives but does nothing."""

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
        """End the plugin when it has not beaten for too long."""
        for pid in list(self._arbiter.get_watcher(self._plugin_name).processes):
            overdue_s = self._stalls.overdue_s(PLUGIN_HEARTBEAT, pid)
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
        found = unstartable_services(self._workers.read())
        for component, worker in found.items():
            if component not in self._reported:
                log = self._log_dir / f"{worker.name}.log"
                self._report(f"No {component} can start: {cause(worker)}\n    log: {log}")
        is_new = bool(found.keys() - self._reported)
        self._reported = set(found)
        if is_new:
            self._lost()


SOCKET_MISSED_CHECKS = 2
"""The number of checks in a row after which a server is started again whose socket was there and is not: one
that starts again by itself makes it."""


class DirectoryWatch:
    """Makes the runtime directory, the link to it, its files and its sockets again when they have vanished.

    ``report(line)`` shows the user a line.
    """

    def __init__(
        self,
        launch: Launch,
        servers: Sequence[ServerSpec],
        arbiter: ServeArbiter,
        report: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._servers = servers
        self._arbiter = arbiter
        self._report = report
        self._root = launch.runtime_dir
        self._identity = _identity(self._root)
        self._texts = {path: path.read_text() for path in self._files()}
        self._reload_seen: tuple[int, int] | None = None
        self._missed: dict[str, int] = {}
        self._trouble = ""

    async def check(self) -> None:
        """Check once, and make again what has vanished; report once what cannot be made again."""
        try:
            for line in [*self._link(), *self._directory(), *self._scratch(), *self._sockets()]:
                self._report(line)
            self._trouble = ""
        except (OSError, DeploymentError) as error:
            if str(error) != self._trouble:
                self._report(f"The runtime directory {self._root} cannot be made again: {error}")
            self._trouble = str(error)

    def _files(self) -> list[Path]:
        return [*self._root.glob("*.json"), *self._root.glob("*/*.conf")]

    def _link(self) -> list[str]:
        link = self._launch.address_dir
        if ensure_link(link, self._root):
            return [f"The runtime directory's link {link} had vanished: it is made again."]
        return []

    def _directory(self) -> list[str]:
        """Make the directory again if it is gone, and kill the servers, which circus starts with new data.

        If it is there, write its missing files again. Return the lines for the user.
        """
        if self._identity == _identity(self._root):
            self._read_reload()
            for path, text in self._texts.items():
                if not path.exists():
                    write_private(path, text)
            return []
        make_private_directory(self._root.parent)
        make_private_directory(self._root)
        for server in self._servers:
            make_private_directory(server.working_dir)
        for path, text in self._texts.items():
            write_private(path, text)
        for server in self._servers:
            self._arbiter.kill_process_of(f"{self._launch.namespace}_{server.name}")
        self._identity = _identity(self._root)
        names = " and ".join(server.name for server in self._servers)
        rest = f", and {names} start again, with new data" if names else ""
        return [f"The runtime directory {self._root} had vanished: it is made again{rest}."]

    def _read_reload(self) -> None:
        """Read the settings of the last reload, if they are others: only those are to be written again."""
        file = self._root / RELOADED_FILE
        with suppress(FileNotFoundError):
            status = file.stat()
            if self._reload_seen != (status.st_mtime_ns, status.st_ino):
                self._texts[file] = file.read_text()
                self._reload_seen = status.st_mtime_ns, status.st_ino

    def _scratch(self) -> list[str]:
        if self._launch.scratch_dir.is_dir():
            return []
        make_private_directory(self._launch.scratch_dir)
        return [f"The scratch directory {self._launch.scratch_dir} had vanished: it is made again."]

    def _sockets(self) -> list[str]:
        lines = []
        if any(not path.exists() for path in self._circus_sockets()):
            self._arbiter.listen_again()
            lines.append("circus' sockets had vanished: they are made again.")
        for server in self._servers:
            if server.socket is None or server.socket.exists():
                self._missed[server.name] = 0
                continue
            if server.name in self._missed:
                self._missed[server.name] += 1
            if self._missed.get(server.name) == SOCKET_MISSED_CHECKS:
                del self._missed[server.name]
                self._arbiter.kill_process_of(f"{self._launch.namespace}_{server.name}")
                lines.append(f"The socket of {server.name} had vanished: the server starts again.")
        return lines

    def _circus_sockets(self) -> list[Path]:
        endpoints = (self._launch.circus_endpoint, self._launch.circus_events)
        return [Path(each.removeprefix("ipc://")) for each in endpoints if each.startswith("ipc://")]


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


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
        """Check whether the server answers; after FAILED_STARTS processes that never did, make it startable.

        A process that has answered once is not asked again.
        """
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
        if line := move_data_into_memory(self._server, self._scratch_dir):
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
            f"{self._server.name} ended {FAILED_STARTS} times before it answered. Its data may be damaged: "
            f"set aside as {aside}. It starts with new data, and what was there is written again. "
            f"Log: {self._log}"
        )


def server_watches(
    launch: Launch, servers: Sequence[ServerSpec], arbiter: ServeArbiter, report: Callable[[str], None]
) -> list[ServerWatch]:
    return [ServerWatch(launch, server, arbiter, report) for server in servers if server.data]
