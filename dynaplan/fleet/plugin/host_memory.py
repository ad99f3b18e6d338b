"""The host's memory, which models on the CPU and saved KV entries share: read seldom, and made room in."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from dynaplan.engines.llamacpp.saved_slots import remove_saved, saved_in
from dynaplan.models.shared_memory import HostMemory
from dynaplan.process.memory import box_memory
from dynaplan.process.worker_memory import held_memory

HOST_POLL_S = 2.0
"""Longest time between two readings of the host's memory, in seconds."""

ReadHost = Callable[[Collection[int]], HostMemory]
"""Reads the host's memory now, and what the workers with these pids hold of it."""


def read_host_memory(pids: Collection[int]) -> HostMemory:
    box, held = box_memory(), held_memory(pids)
    resident_bytes = {pid: each.resident_bytes for pid, each in held.items()}
    own_bytes = sum(each.own_bytes for each in held.values())
    return HostMemory(box.total_bytes, box.available_bytes, resident_bytes, own_bytes)


class HostMemoryPoll:
    """The host's memory as it was read last.

    ``saved`` is the directory in which models save KV entries; None where that takes no memory.
    """

    def __init__(self, read: ReadHost, saved: Path | None = None) -> None:
        self._read_now = read
        self._saved = saved
        self._known: HostMemory | None = None
        self._known_s = -math.inf

    def read(self, pids: Collection[int], now_s: float) -> HostMemory:
        """Return the host's memory, and that of these workers' processes.

        It is read again when HOST_POLL_S have passed, and when the pids are others than in the last call.
        """
        known = self._known
        if known is None or now_s - self._known_s >= HOST_POLL_S or set(pids) != known.resident_bytes.keys():
            known = self._known = replace(self._read_now(pids), saved_bytes=self._saved_bytes())
            self._known_s = now_s
        return known

    def held_bytes(self, pid: int) -> int:
        """Return the memory that a worker holds, read now; the next ``read`` reads anew, too.

        For a worker that has just become ready: the last reading was taken while its model was loading.
        """
        self._known_s = -math.inf
        return self._read_now([pid]).resident_bytes.get(pid, 0)

    def make_room(self, model: str, needed_bytes: int) -> int:
        """Remove saved KV entries as far as the model's load lacks memory; return the bytes removed."""
        if self._saved is None or not self._saved_bytes():
            return 0
        lacking_bytes = needed_bytes - self._read_now([]).available_bytes
        return remove_saved(self._saved, lacking_bytes, model) if lacking_bytes > 0 else 0

    def _saved_bytes(self) -> int:
        return sum(each.size_bytes for each in saved_in(self._saved)) if self._saved else 0


def is_in_memory(directory: Path) -> bool:
    """Return whether files there take memory: it is on a tmpfs."""
    import psutil

    mounts = [each for each in psutil.disk_partitions(all=True) if directory.is_relative_to(each.mountpoint)]
    nearest = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    return nearest is not None and nearest.fstype == "tmpfs"
