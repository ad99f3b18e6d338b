"""Ports to the processes of the box."""

from __future__ import annotations

from typing import Protocol

from dynaplan.process.identity import ProcessIdentity


class Processes(Protocol):
    """The processes of this machine, each distinguished from its successors by its start time."""

    def identify(self, pid: int) -> int | None:
        """Return the process's start, in clock ticks since boot; None without a process, or for a zombie."""
        ...

    def identity_of(self, pid: int) -> ProcessIdentity:
        """Return the identity of a running process; raises ProcessLookupError when it does not run."""
        ...

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Tell whether this very process still runs, and not a later one with its pid."""
        ...

    def kill(self, process: ProcessIdentity) -> None:
        """SIGKILL this very process, and no other of its session; nothing happens when it is gone."""
        ...

    def kill_group(self, pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        """SIGKILL the rest of the session that this very process leads or led; return the pids found in it.

        Some processes get time to clean up after the others. The call blocks for them for ``waits_s`` seconds
        at most and then kills them; with 0 it does not block: call it again until no pid is returned.
        """
        ...

    def oom_kills(self) -> tuple[int, str]:
        """Return how many processes the kernel's out-of-memory killer has ended in our group, or machine."""
        ...
