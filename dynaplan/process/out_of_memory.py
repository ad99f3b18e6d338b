"""The kernel's counts of the processes that its out-of-memory killer has ended; every user may read them."""

from __future__ import annotations

from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")

GROUP, MACHINE = "this control group", "this machine"
"""The two places that a count is about, in words."""


def oom_kills(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> tuple[int, str]:
    """Return the processes ended so far, and where: in our own cgroup (version 2), else on the machine.

    0 where the kernel does not tell.
    """
    own = next((line[3:] for line in _lines(proc / "self/cgroup") if line.startswith("0::")), "")
    if own:
        count = _count(cgroups / own.lstrip("/") / "memory.events")
        if count is not None:
            return count, GROUP
    return _count(proc / "vmstat") or 0, MACHINE


def _count(path: Path) -> int | None:
    found = (line.split() for line in _lines(path) if line.startswith("oom_kill "))
    return next((int(words[1]) for words in found if len(words) == 2 and words[1].isdecimal()), None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
