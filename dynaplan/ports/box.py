"""Ports to the box: time, processes, files and the GPUs that arbiters claim."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from dynaplan.domain.identity import LeaseOwner, ProcessIdentity

if TYPE_CHECKING:
    from pathlib import Path

    from dynaplan.domain.gpus import GpuShare, NodeGpus


class Clock(Protocol):
    """Monotonic time in seconds, which a test can replace."""

    def now_s(self) -> float:
        """Return the seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when that many seconds have passed."""
        ...


class Processes(Protocol):
    """The processes of this machine, each told from its successors by its start time."""

    def identify(self, pid: int) -> int | None:
        """Return the process's start, in clock ticks since boot; None without a process, or for a zombie."""
        ...

    def identity_of(self, pid: int) -> ProcessIdentity:
        """Return the identity of a running process; raises ProcessLookupError when it does not run."""
        ...

    def is_alive(self, process: ProcessIdentity) -> bool:
        """Tell whether this very process still runs, and not a later one with its pid."""
        ...

    def kill_group(self, pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
        """SIGKILL the rest of the session that this very process leads or led; return the pids found in it.

        Some processes get time to clean up after the others. The call blocks for them for ``waits_s`` seconds
        at most and then kills them; with 0 it does not block: call it again until no pid is returned.
        """
        ...


class ProcessWatch(Protocol):
    """Processes that are watched for their end."""

    def follow(self, owners: Collection[LeaseOwner]) -> None:
        """Watch exactly these from now on; one that cannot be seen from here is never told of."""
        ...

    def close(self) -> None:
        """Stop watching, and give back what the watch held; no end is told afterwards."""
        ...


class DocumentStore(Protocol):
    """One JSON document, the statefile, replaced as a whole."""

    def read(self) -> dict[str, Any] | None:
        """Return the document, None when there is none; raises StatefileCorrupt."""
        ...

    def write(self, document: dict[str, Any]) -> None:
        """Replace the document as a whole; raises StatefileUnwritable, and the old one stays then."""
        ...

    def remove(self) -> None:
        """Delete the document; nothing happens when there is none."""
        ...

    def set_aside(self) -> Path:
        """Move a document that cannot be read out of the way; return its new path."""
        ...


class Claims(Protocol):
    """One arbiter's claims on GPUs of this machine, by UUID. Methods raise DeploymentError."""

    def claim(self, uuids: Iterable[str]) -> set[str]:
        """Claim these GPUs; return the subset that is now ours."""
        ...

    def release(self, uuids: Iterable[str]) -> None:
        """Give these GPUs back; nothing happens for one that is not this process's."""
        ...

    def foreign(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the subset that other living arbiters hold: UUID -> the holder, in words."""
        ...

    def publish(self, share: Callable[[NodeGpus], GpuShare]) -> None:
        """Call ``share`` with what all have published and claimed, and publish its result, in one step."""
        ...

    def withdraw(self) -> None:
        """Publish nothing more; nothing happens when nothing was published."""
        ...


class StartupTimes(Protocol):
    """The durations of earlier starts, in seconds, by what they depend on. A cache: it never raises."""

    def read(self) -> dict[str, list[float]]:
        """Return the last durations of every key, oldest first."""
        ...

    def learn(self, key: str, seconds: float) -> None:
        """Add the duration of a start under its key; the oldest of a few is forgotten."""
        ...
