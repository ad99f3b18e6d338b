"""The identity of a process: pid, start time and boot, since a pid alone is reused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynaplan.util.documents import text_field, whole_field


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, for ever: ``started_at`` is its start in clock ticks since the boot named ``boot_id``.

    ``started_at`` is field 22 of ``/proc/<pid>/stat``, ``boot_id`` is ``/proc/sys/kernel/random/boot_id``.
    """

    pid: int
    started_at: int
    boot_id: str

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ProcessIdentity:
        """Read its form in JSON; raises ValueError, and nothing else, when it is not one."""
        pid, started_at = whole_field(record, "pid"), whole_field(record, "started_at")
        return cls(pid, started_at, text_field(record, "boot_id"))


@dataclass(frozen=True)
class LeaseOwner:
    """The process that a lease dies with, and the namespace (an inode number) in which its pid counts."""

    process: ProcessIdentity
    pid_namespace: int

    def to_record(self) -> dict[str, Any]:
        return {**asdict(self.process), "pid_namespace": self.pid_namespace}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> LeaseOwner:
        """Read its form in JSON; raises ValueError, and nothing else, when it is not one."""
        return cls(ProcessIdentity.from_record(record), whole_field(record, "pid_namespace"))
