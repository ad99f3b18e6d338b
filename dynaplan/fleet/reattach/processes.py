# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The watchers and processes of circus under ``serve``: starts are retried, and a holder may be the parent.

1. ``RetryingWatcher``: out of processes, memory or descriptors for a moment, the system refuses a fork.
   circus then takes the watcher for stopped, and one that it was to restart by itself, an embedded server
   or the fleet plugin, would never come back.
2. ``HolderProcess``: where a holder is the parent, processes go on when ``serve`` dies, and are adopted.
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
from dynaplan.process.holder import OF_THE_PROGRAM
from dynaplan.process.holder_link import HolderLink

log = logging.getLogger(__name__)


class RetryingWatcher(Watcher):
    """A watcher that tries again at circus' next check, if it restarts its process (``respawn``)."""

    _is_refused = False

    def spawn_process(self, recovery_wid: int | None = None) -> Any:
        """Start a process; return its start time, True if it is to be tried again, False to be stopped."""
        started = super().spawn_process(recovery_wid)
        self._is_refused = started is False and self.respawn
        if self._is_refused:
            log.warning("%s could not be started; it is tried again", self.name)
        return started or self._is_refused

    @gen.coroutine
    def _start(self) -> Generator[Any, Any, None]:
        """Start the process; a refused start leaves the watcher active, which circus would stop."""
        yield super()._start()
        if self._is_refused and self._status == "stopped":
            self._status = "active"


FIRST, WORKERS, SERVERS = 0, 1, 2
"""The order in which the holder ends processes without ``serve``, as ``serve`` does: Frontends and the
planner, then workers, then servers."""

PUBLIC_SOCKET = "public socket"
"""The name by which the holder keeps the socket that the Frontends listen on."""

EXIT_CODE_TIMEOUT_S = 1.0
"""Longest wait for the exit code of a process that was just killed."""


class HolderProcess(Process):
    """A process of circus that is the holder's child: started by it, or adopted after a restart of serve."""

    wait_status: int | None = None

    def spawn(self) -> None:
        """Adopt the process of this name, or have a new one started; OSError when it cannot be.

        A worker that ended before it was adopted is the fleet plugin's to start again: ProcessLookupError.
        """
        fleet: HolderFleet = self.watcher.holder_fleet
        pid = fleet.adoptable.pop(self.name, 0)
        if not pid:
            fleet.check_not_lost(self.name, self.watcher)
            pid = self._started(fleet)
        # The holder reaps it only when its end is noted: until then it is there, maybe as a zombie.
        worker: Any = psutil.Process(pid)
        worker.stdout = worker.stderr = None
        # circus would wait for a start that lies ahead, as one does whose clock was set back meanwhile.
        self._worker, self.started = worker, min(worker.create_time(), time.time())
        fleet.processes[pid] = self

    def _started(self, fleet: HolderFleet) -> int:
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        try:
            listening = self._get_stdin_socket_fd()
            streams = (nothing if listening is None else listening, 1, 2)
            stage = fleet.stage_of(self.watcher)
            return fleet.link.spawn(self.name, stage, self.format_args(), self.working_dir, self.env, streams)
        finally:
            os.close(nothing)

    def returncode(self) -> int | None:
        """Return the exit code, a negative one for a signal; None while it is not known.

        circus asks in the moment after a kill: the code is waited for then.
        """
        fleet: HolderFleet = self.watcher.holder_fleet
        deadline_s = time.monotonic() + EXIT_CODE_TIMEOUT_S
        while self.wait_status is None and not _is_running(self._worker) and time.monotonic() < deadline_s:
            fleet.link.poll()
            time.sleep(0.001)
        return self.poll()

    def poll(self) -> int | None:
        """Return the exit code; None until the holder has reported the end."""
        return None if self.wait_status is None else os.waitstatus_to_exitcode(self.wait_status)

    @property
    def status(self) -> int:
        """Return circus' word for its state: dead as soon as the holder has reported the end."""
        return int(RUNNING if self.wait_status is None else DEAD_OR_ZOMBIE)


def _is_running(process: Any) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class HolderWatcher(RetryingWatcher):
    holder_fleet: HolderFleet
    ends_with_serve: bool

    @property
    def _process_class(self) -> type[Process]:
        return HolderProcess


class HolderFleet:
    """The processes below the holder. ``adoptable`` are those of a ``serve`` before this one, by watcher.

    ``takers`` are the services that take requests, and the planner.
    """

    def __init__(self, link: HolderLink, adoptable: Mapping[str, int], takers: Collection[str]) -> None:
        self.link = link
        self.adoptable = dict(adoptable)
        self.processes: dict[int, HolderProcess] = {}
        self._takers = takers
        self._lost: set[str] = set()
        self._ended: list[HolderProcess] = []
        self._wake: Callable[[], None] = lambda: None
        link.on_end = self._note_end

    def watch(self, loop: Any, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever a process has ended, from now on."""
        self._wake = wake
        loop.add_reader(self.link.fileno(), self.link.poll)

    def attach(self, watcher: Any, *, ends_with_serve: bool = False) -> None:
        """Have a watcher of circus start its process here: one to be adopted, or to end with ``serve``."""
        watcher.__class__ = HolderWatcher
        watcher.holder_fleet = self
        watcher.ends_with_serve = ends_with_serve

    def stage_of(self, watcher: HolderWatcher) -> int:
        """Return when the process of a watcher is ended, compared with others."""
        if watcher.ends_with_serve:
            return OF_THE_PROGRAM
        service = service_of(watcher.args)
        if not service:
            return SERVERS
        return FIRST if service in self._takers else WORKERS

    def check_not_lost(self, name: str, watcher: Watcher) -> None:
        """Raise ProcessLookupError, once, for a worker whose process ended before it was adopted."""
        is_lost = name in self._lost
        self._lost.discard(name)
        if is_lost and service_of(watcher.args):
            raise ProcessLookupError(f"{name} ended before it was adopted")

    def reap(self) -> None:
        """Tell circus of the processes that have ended, as its own reaping does."""
        self.link.poll()
        ended, self._ended = self._ended, []
        for process in ended:
            if not process.watcher.is_stopped():
                process.watcher.processes[process.pid] = process  # which circus may have dropped in silence
                process.watcher.reap_process(process.pid, process.wait_status)

    def _note_end(self, pid: int, wait_status: int) -> None:
        process = self.processes.pop(pid, None)
        if process is None:
            self._lost |= {name for name, each in self.adoptable.items() if each == pid}
            self.adoptable = {name: each for name, each in self.adoptable.items() if each != pid}
            return
        process.wait_status = wait_status
        self._ended.append(process)
        with suppress(RuntimeError):  # the loop is closing
            self._wake()
