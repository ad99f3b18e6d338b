# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""circus' watchers and processes: failed starts are retried, and the parent may be the supervisor.

1. ``RetryingWatcher``: when a fork fails for a moment (EAGAIN, ENOMEM, EMFILE), circus marks the watcher as
   stopped, and would never restart an embedded server or the fleet plugin.
2. ``SupervisedProcess``: where a supervisor is the parent, processes go on when ``serve`` dies, and are
   adopted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import suppress
from typing import Any

import psutil
from circus.process import DEAD_OR_ZOMBIE, RUNNING, Process
from circus.watcher import Watcher
from tornado import gen

from dynaplan.fleet.watchers import service_of
from dynaplan.process.supervisor import PROGRAM_STAGE
from dynaplan.process.supervisor_link import SupervisorLink

log = logging.getLogger(__name__)


class RetryingWatcher(Watcher):
    """A watcher that tries again at circus' next check, if it restarts its process (``respawn``)."""

    _fork_failed = False

    def spawn_process(self, recovery_wid: int | None = None) -> Any:
        """Start a process; return its start time, True to retry at the next check, False to give up."""
        started = super().spawn_process(recovery_wid)
        self._fork_failed = started is False and self.respawn
        if self._fork_failed:
            log.warning("%s could not be started; it is tried again", self.name)
        return started or self._fork_failed

    @gen.coroutine
    def _start(self) -> Generator[Any, Any, None]:
        """Start the process; a refused start leaves the watcher active, which circus would stop."""
        yield super()._start()
        if self._fork_failed and self._status == "stopped":
            self._status = "active"


FRONTEND_STAGE, WORKER_STAGE, SERVER_STAGE = 0, 1, 2
"""The order in which the supervisor ends processes without ``serve``, as ``serve`` does: Frontends and the
planner, then workers, then servers."""

PUBLIC_SOCKET_NAME = "public socket"
"""The name by which the supervisor keeps the socket that the Frontends listen on."""

EXIT_CODE_TIMEOUT_S = 1.0
"""Longest wait for the exit code of a process that was just killed."""

REMEMBERED_ENDS = 256
"""The number of ended processes whose exit codes are kept for a fleet plugin that starts."""


class SupervisedProcess(Process):
    """A process of circus whose parent is the supervisor: started by it, or adopted after a crash."""

    wait_status: int | None = None

    def spawn(self) -> None:
        """Adopt the process of this name, or have a new one started; OSError when it cannot be.

        Raises ProcessLookupError for a worker that ended before it was adopted: the fleet plugin restarts it.
        """
        fleet: SupervisedFleet = self.watcher.supervised_fleet
        pid = fleet.adoptable.pop(self.name, 0)
        if not pid:
            fleet.raise_if_lost(self.name, self.watcher)
            pid = self._request_spawn(fleet)
        # The pid stays valid, at worst a zombie's, until we have acknowledged the supervisor's exit report.
        worker: Any = psutil.Process(pid)
        worker.stdout = worker.stderr = None
        # After the clock was set back create_time() may be in the future, and circus would wait for it.
        self._worker, self.started = worker, min(worker.create_time(), time.time())
        fleet.processes[pid] = self

    def _request_spawn(self, fleet: SupervisedFleet) -> int:
        devnull = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            listening = self._get_stdin_socket_fd()
            streams = (devnull if listening is None else listening, 1, 2)
            stage = fleet.stop_stage_of(self.watcher)
            return fleet.link.spawn(self.name, stage, self.format_args(), self.working_dir, self.env, streams)
        finally:
            os.close(devnull)

    def returncode(self) -> int | None:
        """Return the exit code, a negative one for a signal; None while it is not known.

        Blocks for up to EXIT_CODE_TIMEOUT_S after an exit: circus asks right after a kill.
        """
        fleet: SupervisedFleet = self.watcher.supervised_fleet
        deadline_s = time.monotonic() + EXIT_CODE_TIMEOUT_S
        while self.wait_status is None and not _is_running(self._worker) and time.monotonic() < deadline_s:
            fleet.link.poll()
            time.sleep(0.001)
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code; None until the supervisor has reported it."""
        return None if self.wait_status is None else os.waitstatus_to_exitcode(self.wait_status)

    @property
    def status(self) -> int:
        """Return circus' status constant: dead as soon as the supervisor has reported the exit."""
        return int(RUNNING if self.wait_status is None else DEAD_OR_ZOMBIE)


def _is_running(process: Any) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class SupervisedWatcher(RetryingWatcher):
    supervised_fleet: SupervisedFleet
    ends_with_serve: bool

    @property
    def _process_class(self) -> type[Process]:
        return SupervisedProcess


class SupervisedFleet:
    """The processes that are children of the supervisor.

    ``adoptable``: watcher name -> pid of what the previous ``serve`` has left running.
    ``entry_services``: the services that take clients' requests, and the planner.
    ``ended``: pid -> wait status of what has ended since the previous ``serve``.
    """

    def __init__(
        self,
        link: SupervisorLink,
        adoptable: Mapping[str, int],
        entry_services: Collection[str],
        ended: Mapping[int, int],
    ) -> None:
        self.link = link
        self.adoptable = dict(adoptable)
        self.processes: dict[int, SupervisedProcess] = {}
        self._entry_services = entry_services
        self._ended_before_adoption: set[str] = set()
        self._ended: list[SupervisedProcess] = []
        self._wait_statuses = dict(ended)
        self._on_exit: Callable[[], None] = lambda: None
        link.on_end = self._note_end

    def notify_on_exit(self, loop: Any, on_exit: Callable[[], None]) -> None:
        """Call ``on_exit`` at every exit of a process from now on."""
        self._on_exit = on_exit
        loop.add_reader(self.link.fileno(), self.link.poll)

    def use_supervisor(self, watcher: Any, *, ends_with_serve: bool = False) -> None:
        """Make a watcher of circus start or adopt its process through the supervisor.

        With ``ends_with_serve`` the supervisor kills it whenever ``serve`` ends.
        """
        watcher.__class__ = SupervisedWatcher
        watcher.supervised_fleet = self
        watcher.ends_with_serve = ends_with_serve

    def stop_stage_of(self, watcher: SupervisedWatcher) -> int:
        """Return the stage in which the supervisor stops the watcher's process."""
        if watcher.ends_with_serve:
            return PROGRAM_STAGE
        service = service_of(watcher.args)
        if not service:
            return SERVER_STAGE
        return FRONTEND_STAGE if service in self._entry_services else WORKER_STAGE

    def raise_if_lost(self, name: str, watcher: Watcher) -> None:
        """Raise ProcessLookupError, once, for a worker whose process ended before it was adopted."""
        is_lost = name in self._ended_before_adoption
        self._ended_before_adoption.discard(name)
        if is_lost and service_of(watcher.args):
            raise ProcessLookupError(f"{name} ended before it was adopted")

    def reap(self) -> None:
        """Report exited processes to circus, as its own reaping does."""
        self.link.poll()
        ended, self._ended = self._ended, []
        for process in ended:
            if not process.watcher.is_stopped():
                process.watcher.processes[process.pid] = process  # circus may have dropped it
                process.watcher.reap_process(process.pid, process.wait_status)

    @property
    def exit_codes(self) -> dict[int, int]:
        """The exit codes of the last processes that have ended, by pid; below 0 for a signal."""
        return {pid: os.waitstatus_to_exitcode(status) for pid, status in self._wait_statuses.items()}

    def _note_end(self, pid: int, wait_status: int) -> None:
        self._wait_statuses[pid] = wait_status
        if len(self._wait_statuses) > REMEMBERED_ENDS:
            del self._wait_statuses[next(iter(self._wait_statuses))]
        process = self.processes.pop(pid, None)
        if process is None:
            self._ended_before_adoption |= {name for name, each in self.adoptable.items() if each == pid}
            self.adoptable = {name: each for name, each in self.adoptable.items() if each != pid}
            return
        process.wait_status = wait_status
        self._ended.append(process)
        with suppress(RuntimeError):  # the loop is closing
            self._on_exit()
