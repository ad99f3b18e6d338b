"""The memory of this box: the machine's, or the part of it that the container may use."""

from __future__ import annotations

from pathlib import Path

import psutil

from dynaplan.process.memory_model import BoxMemory

CGROUP = Path("/sys/fs/cgroup")


def box_memory(cgroup: Path = CGROUP) -> BoxMemory:
    """Return the memory in total, swap included, and the memory that is available now, in bytes."""
    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    total_bytes, available_bytes = machine.total + swap.total, machine.available
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        total_bytes = min(total_bytes, limit)
        available_bytes = min(available_bytes, max(0, limit - used + _reclaimable(cgroup / "memory.stat")))
    return BoxMemory(total_bytes, available_bytes)


def _reclaimable(path: Path) -> int:
    """Return the bytes of files in memory that the kernel gives back when they are needed."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        return sum(int(line[1]) for line in lines if line[:1] == ["inactive_file"])
    except (OSError, ValueError, IndexError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
