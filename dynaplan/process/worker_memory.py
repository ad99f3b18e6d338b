"""The host's memory that the processes of a worker hold, as ``/proc`` shows it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from dynaplan.process.kernel import descendants, parents

_PROC = Path("/proc")


@dataclass(frozen=True)
class HeldMemory:
    """The memory of one worker's processes in bytes.

    ``resident_bytes`` are all pages that they have in memory, files that they map included. ``own_bytes`` are
    those that the kernel cannot give back: without the files.
    """

    resident_bytes: int = 0
    own_bytes: int = 0


def held_memory(pids: Collection[int]) -> Mapping[int, HeldMemory]:
    """Return the memory of each worker's processes, by pid: the process of that pid and all below it."""
    parent_of = parents()
    return {pid: _sum({pid, *descendants(pid, parent_of)}) for pid in pids}


def _sum(pids: Collection[int]) -> HeldMemory:
    held = [_memory_of_process(pid) for pid in pids]
    return HeldMemory(sum(each.resident_bytes for each in held), sum(each.own_bytes for each in held))


def _memory_of_process(pid: int) -> HeldMemory:
    try:
        lines = (_PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return HeldMemory()
    sizes = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    own = sum(_bytes(sizes.get(name, "")) for name in ("RssAnon", "RssShmem"))
    return HeldMemory(own + _bytes(sizes.get("RssFile", "")), own)


def _bytes(text: str) -> int:
    number = text.split()[:1]
    return int(number[0]) * 1024 if number and number[0].isdecimal() else 0
