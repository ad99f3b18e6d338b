"""Heartbeats: a small file for each process of a deployment, rewritten at short intervals while it runs.

A beat holds the process's pid, start time and boot, and the moment on the monotonic clock, which is the same
in all processes of one boot, never jumps, and stands still while the machine sleeps.
"""

from __future__ import annotations

import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from dynaplan.process import process_table as processes
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.documents import number_field, parse_object

SERVE_HEARTBEAT = "serve"
"""The name under which the process of ``dynaplan serve``, the arbiter, beats."""

PLUGIN_HEARTBEAT = "fleet-plugin"
"""The name under which the fleet plugin beats. A planner beats under its worker's name."""

LATE_AFTER_S = 10.0
"""Seconds beyond its interval after which a beat is late: a busy machine delays it by less."""


@dataclass(frozen=True)
class Heartbeat:
    """A process and its last beat, as seen at one moment.

    ``beat_s`` is the moment of the last beat on the monotonic clock of this boot, ``silent_s`` the seconds
    since then, and ``every_s`` the interval in seconds that the process keeps.
    """

    process: ProcessIdentity
    beat_s: float
    silent_s: float
    every_s: float
    is_alive: bool

    @property
    def is_late(self) -> bool:
        """True when the process lives and its next beat is overdue."""
        return self.is_alive and self.silent_s > self.every_s + LATE_AFTER_S

    def trouble(self, name: str) -> str:
        """The fault, about a process of that name; empty without one."""
        if not self.is_alive:
            return f"{name} (pid {self.process.pid}) has ended"
        if self.is_late:
            return f"{name} (pid {self.process.pid}) has not answered for {self.silent_s:.0f} s"
        return ""


class Heartbeats(Protocol):
    """The heartbeats of a deployment's own processes, by name. Neither method raises."""

    def beat(self, name: str, every_s: float) -> None:
        """Beat: this process is alive, and beats again within ``every_s`` seconds."""
        ...

    def read(self, name: str) -> Heartbeat | None:
        """The heartbeat of that process; None when it has never beaten, or what it wrote cannot be read."""
        ...


log = logging.getLogger(__name__)


LENGTH_BYTES = 256
"""The length of a beat, filled up with spaces: each write covers the one before, and needs no new file."""


class HeartbeatFiles:
    """The heartbeats in one private directory, which is made when it is not there.

    A file stays open, and a beat is one write into it: some tens of microseconds less than a new file, each
    second in each process. A reader in the midst of a write sees one of the two moments, or digits of both,
    which its next look corrects.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._beaten_s: dict[str, float] = {}
        self._descriptors: dict[str, int] = {}

    @classmethod
    def of(cls, runtime_dir: Path) -> HeartbeatFiles:
        return cls(runtime_dir / "heartbeats")

    def __del__(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def beat(self, name: str, every_s: float) -> None:
        """Beat: this process is alive, and beats again within ``every_s`` seconds.

        Nothing is written less than half of ``every_s`` after the last beat of that name. A file that cannot
        be written is logged: a process that works must not end by saying so.
        """
        now_s = time.monotonic()
        if now_s - self._beaten_s.get(name, -every_s) < every_s / 2:
            return
        self._beaten_s[name] = now_s
        me = _me(os.getpid())
        document = {**asdict(me), "beat_s": round(now_s, 3), "every_s": every_s}
        try:
            descriptor = self._descriptors.get(name)
            if descriptor is None or os.fstat(descriptor).st_nlink == 0:
                descriptor = self._create(name)
            os.pwrite(descriptor, json.dumps(document).ljust(LENGTH_BYTES).encode(), 0)
        except OSError as error:
            log.debug("no heartbeat: %s", error)

    def _create(self, name: str) -> int:
        """Create the heartbeat file, replacing another process's; return its descriptor."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        path = self.path(name)
        path.unlink(missing_ok=True)
        made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        if name in self._descriptors:
            os.close(self._descriptors[name])
        self._descriptors[name] = made
        return made

    def read(self, name: str) -> Heartbeat | None:
        """The heartbeat of that process; None when it has never beaten, or what it wrote cannot be read."""
        try:
            document = parse_object(self.path(name).read_bytes())
            process = ProcessIdentity.from_record(document)
            beat_s, every_s = number_field(document, "beat_s"), number_field(document, "every_s")
        except (OSError, ValueError):
            return None
        silent_s = max(0.0, time.monotonic() - beat_s)
        return Heartbeat(process, beat_s, silent_s, every_s, processes.is_alive(process))

    def path(self, name: str) -> Path:
        return self._directory / f"{name}.json"


@cache
def _me(pid: int) -> ProcessIdentity:
    return processes.identity_of(pid)
