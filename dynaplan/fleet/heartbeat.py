"""The pulse of a process that says at short intervals that it goes on: on time, late, or dead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dynaplan.process.identity import ProcessIdentity

SERVE_PULSE = "serve"
"""The name under which the process of ``dynaplan serve``, the arbiter, beats."""

PLUGIN_PULSE = "fleet-plugin"
"""The name under which the fleet plugin beats. A planner beats under its worker's name."""

LATE_AFTER_S = 10.0
"""Seconds beyond its interval after which a beat is late: a busy machine delays it by less."""


@dataclass(frozen=True)
class Pulse:
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
        """The fault in words, about a process of that name; empty when there is none."""
        if not self.is_alive:
            return f"{name} (pid {self.process.pid}) has ended"
        if self.is_late:
            return f"{name} (pid {self.process.pid}) has not answered for {self.silent_s:.0f} s"
        return ""


class Heartbeats(Protocol):
    """The heartbeats of a deployment's own processes, by name. Neither method raises."""

    def beat(self, name: str, every_s: float) -> None:
        """Say that this process goes on, and will say so again in ``every_s`` seconds."""
        ...

    def read(self, name: str) -> Pulse | None:
        """The pulse of that process; None when it has never beaten."""
        ...
