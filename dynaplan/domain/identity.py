"""The identity of a process: pid, start time and boot, since a pid alone is reused."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, for ever: ``started_at`` is its start in clock ticks since the boot named ``boot_id``.

    ``started_at`` is field 22 of ``/proc/<pid>/stat``, ``boot_id`` is ``/proc/sys/kernel/random/boot_id``.
    """

    pid: int
    started_at: int
    boot_id: str
