"""The memory of this box, or the part of it that the container may use, and the ends for lack of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BoxMemory:
    """The memory of a box in bytes: all of it, and what is available at this moment."""

    total_bytes: int
    available_bytes: int


CGROUP = Path("/sys/fs/cgroup")


def box_memory(cgroup: Path = CGROUP) -> BoxMemory:
    """Return the machine's memory, swap included, and what of it is available now, without swap.

    A memory limit of the cgroup bounds both.
    """
    import psutil  # much, for a process that only counts kills

    machine, swap = psutil.virtual_memory(), psutil.swap_memory()
    total_bytes, available_bytes = machine.total + swap.total, machine.available
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is not None and used is not None:
        total_bytes = min(total_bytes, limit)
        freed_bytes = _count(cgroup / "memory.stat", "inactive_file") or 0  # files, when memory is needed
        available_bytes = min(available_bytes, max(0, limit - used + freed_bytes))
    return BoxMemory(total_bytes, available_bytes)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

GROUP, MACHINE = "this control group", "this machine"
"""The two places that a count is about, in words."""


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str]:
    """Return how many processes the out-of-memory killer has ended so far, and where they were counted.

    That is this process's own cgroup (version 2), else the machine. The number is 0 where the kernel does not
    tell.
    """
    own = next((line[3:] for line in _lines(proc / "self/cgroup") if line.startswith("0::")), "")
    if own:
        count = _count(cgroups / own.lstrip("/") / "memory.events", "oom_kill")
        if count is not None:
            return count, GROUP
    return _count(proc / "vmstat", "oom_kill") or 0, MACHINE


def _count(path: Path, name: str) -> int | None:
    found = (line.split() for line in _lines(path) if line.startswith(f"{name} "))
    return next((int(words[1]) for words in found if len(words) == 2 and words[1].isdecimal()), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
