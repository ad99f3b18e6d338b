"""The memory that several models share: of GPUs as their driver says it, of the host as the kernel does.

1. *GPUs.* Of what the driver says is in use, ours is what our workers were given there; the rest is foreign.
   A worker that loads has not taken all of that yet, and what others hold could hide behind it: until it is
   ready, what was foreign before stays so.
   A worker that has gone leaves memory behind for a moment: its model counts as draining until the driver has
   been read since and the memory is back. What is not back after ``BEING_FREED_S`` is foreign.
   A worker that has fallen asleep leaves memory behind in the same way, and holds what is not back.
   Of some workers nobody knows what they need (``by_driver``): a command, whose processes may be those of a
   container, and no children of ours. Such a worker holds what the driver says after its load beyond what it
   said before, where nobody else came or went on its GPUs meanwhile.
2. *The host*, for engines that compute on the CPU. A worker holds the pages that its processes have in memory
   (``process/worker_memory.py``); foreign is what the kernel could not give to anybody and no worker has.
   KV entries that models have saved in memory are not foreign: they are removed for a load that needs theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from dynaplan.contract.gpus import UNREADABLE, Gpu, GpuUse
from dynaplan.engines.llamacpp.saved_slots import remove_saved, saved_in
from dynaplan.fleet.plugin.gpu_availability import BEING_FREED_S, NOT_READ
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.models.model import HOST, Device
from dynaplan.process.memory import BoxMemory, box_memory
from dynaplan.process.worker_memory import HeldMemory, held_memory

HOST_POLL_S = 2.0
"""Longest time between two readings of the host's memory, in seconds."""

LEFTOVER_BYTES = 2**28
"""Memory of a GPU that is not told from none: a driver's own tables move."""

LOADING = (WorkerState.STARTING, WorkerState.BACKOFF)
"""The states of a worker that may not have taken yet what it was given."""

SETTLE_S = 10.0
"""For how long after its load a worker's memory is still compared with what was in use before."""

NOTHING_KEPT: Mapping[str, int] = {}

SharedDevices = Sequence[tuple[Gpu, GpuUse, str]]
"""Each GPU, its use, and why nothing may be placed there, or empty."""


@dataclass(frozen=True)
class HostMemory:
    """The host's memory at one moment, what of it workers hold, by pid, and what saved KV entries do."""

    box: BoxMemory
    held: Mapping[int, HeldMemory] = field(default_factory=dict)
    saved_bytes: int = 0


ReadHost = Callable[[Sequence[int]], HostMemory]
"""Reads the host's memory now, and what the workers with these pids hold of it."""


def read_host_memory(pids: Sequence[int]) -> HostMemory:
    return HostMemory(box_memory(), held_memory(pids))


def is_in_memory(directory: Path) -> bool:
    """Return whether files there take memory: it is on a tmpfs."""
    import psutil

    mounts = [each for each in psutil.disk_partitions(all=True) if directory.is_relative_to(each.mountpoint)]
    nearest = max(mounts, key=lambda each: len(each.mountpoint), default=None)
    return nearest is not None and nearest.fstype == "tmpfs"


@dataclass
class _Leftover:
    """What a worker that has gone at ``gone_s`` still holds, by GPU, and what was foreign there before."""

    component: str
    bytes: dict[int, int]
    foreign_before: Mapping[int, int]
    gone_s: float


@dataclass
class _Growth:
    """What was in use of a worker's GPUs before its load, beside which others, and by how much that grew."""

    before: Mapping[int, int]
    beside: frozenset[str]
    bytes: dict[int, int] = field(default_factory=dict)
    is_over: bool = False


class SharedMemory:
    """Follows the memory from pass to pass.

    Of each device ``budget_bytes`` may be taken; 0 is all of it. ``saved_directory`` is where models save KV
    entries, if that is in memory.
    """

    def __init__(
        self, read_host: ReadHost, budget_bytes: int = 0, saved_directory: Path | None = None
    ) -> None:
        self._read_host = read_host
        self._budget_bytes = budget_bytes
        self._saved_directory = saved_directory
        self._host: HostMemory | None = None
        self._host_read_s = -math.inf
        self._given: dict[str, Worker] = {}
        self._foreign: dict[int, int] = {}
        self._left: dict[str, _Leftover] = {}
        self._growth: dict[str, _Growth] = {}
        self._used: Mapping[int, int] = {}
        self._devices: tuple[Device, ...] = ()

    def follow(
        self,
        workers: Iterable[Worker],
        devices: SharedDevices,
        *,
        has_host: bool,
        now_s: float,
        kept_bytes: Mapping[str, int] = NOTHING_KEPT,
        by_driver: Container[str] = (),
    ) -> tuple[Device, ...]:
        """Take over the workers and the use of GPUs as they are now; return the devices.

        ``has_host``: some models are in the host's memory. ``kept_bytes`` is what sleepers keep of a device,
        by name. ``by_driver`` are the components whose workers hold what the driver says.
        """
        found = list(workers)
        given = {
            each.name: replace(each, memory_bytes=kept_bytes.get(each.name, each.memory_bytes))
            for each in found
            if each.gpus and each.memory_bytes
        }
        loading = {index for each in found if each.state in LOADING for index in each.gpus}
        self._follow_leftovers(given, devices, loading, now_s, kept_bytes)
        self._follow_growth(given.values(), by_driver, devices, now_s)
        self._devices = tuple(
            self._device(
                gpu.index, gpu.memory_bytes, self._foreign.get(gpu.index, 0), "" if why == NOT_READ else why
            )
            for gpu, _, why in devices
        )
        if has_host:
            self._devices += (self._host_device([each for each in found if not each.gpus], now_s),)
        return self._devices

    def held(self, worker: Worker | None, component: str) -> Mapping[int, int]:
        """Return what the worker holds by device; without one, what those of the component left behind.

        A sleeper holds what it keeps and what has not come back. Empty where it is not seen.
        """
        if worker is None:
            left = [
                each.bytes
                for name, each in self._left.items()
                if each.component == component and name not in self._given
            ]
            return {index: sum(each.get(index, 0) for each in left) for index in {*chain(*left)}}
        left_by_sleep, given = self._left.get(worker.name), self._given.get(worker.name)
        if left_by_sleep and given:
            return {index: held + given.memory_bytes for index, held in left_by_sleep.bytes.items()}
        growth = self._growth.get(worker.name)
        if growth and growth.bytes:
            return growth.bytes
        if worker.gpus or not worker.pid or self._host is None:
            return {}
        held = self._host.held.get(worker.pid)
        return {HOST: held.resident_bytes} if held and held.resident_bytes else {}

    def measure(self, worker: Worker) -> int:
        """Return what a worker that has just become ready holds of a device; 0 where that is not seen."""
        if worker.gpus or not worker.pid:
            return max(self.held(worker, worker.component).values(), default=0)
        self._host_read_s = -math.inf  # what was read of it last is of its load
        held = self._read_host([worker.pid]).held.get(worker.pid)
        return held.resident_bytes if held else 0

    def make_room_on_host(self, model: str, needed_bytes: int) -> int:
        """Remove saved KV entries for a load that needs so much of the host; return the bytes removed."""
        if self._saved_directory is None or not self._saved_bytes():
            return 0
        lacking_bytes = needed_bytes - self._read_host([]).box.available_bytes
        return remove_saved(self._saved_directory, lacking_bytes, model) if lacking_bytes > 0 else 0

    def _saved_bytes(self) -> int:
        if self._saved_directory is None:
            return 0
        return sum(each.size_bytes for each in saved_in(self._saved_directory))

    def _follow_leftovers(
        self,
        given: dict[str, Worker],
        devices: SharedDevices,
        loading: Container[int],
        now_s: float,
        sleepers: Container[str],
    ) -> None:
        for name, before in self._given.items():
            now = given.get(name)
            if now is None or (name in sleepers and now.memory_bytes != before.memory_bytes):
                freed = dict.fromkeys(before.gpus, before.memory_bytes - (now.memory_bytes if now else 0))
                growth = self._growth.get(name)
                foreign = {**self._foreign, **(growth.before if growth and not growth.beside else {})}
                self._left[name] = _Leftover(before.component, freed, foreign, now_s)
        self._given = given
        unread = {gpu.index for gpu, _, why in devices if why in (NOT_READ, UNREADABLE)}
        excess = {
            gpu.index: max(
                0,
                use.used_bytes
                - sum(self._taken(each, gpu.index) for each in given.values() if gpu.index in each.gpus),
            )
            for gpu, use, _ in devices
        }
        for name, left in list(self._left.items()):
            left.bytes = {
                index: held
                if index in unread
                else min(held, excess[index] - left.foreign_before.get(index, 0))
                for index, held in left.bytes.items()
                if index in excess
            }
            is_back = all(held < LEFTOVER_BYTES for held in left.bytes.values())
            if is_back or now_s - left.gone_s > BEING_FREED_S or (name in given and name not in sleepers):
                del self._left[name]
        unsettled = unread | {index for left in self._left.values() for index in left.bytes}
        self._foreign |= {
            index: max(each, self._foreign.get(index, 0)) if index in loading else each
            for index, each in excess.items()
            if index not in unsettled
        }

    def _taken(self, worker: Worker, index: int) -> int:
        """Return what counts as the worker's of that GPU: what it was given, if its growth is unknown."""
        growth = self._growth.get(worker.name)
        return growth.bytes.get(index, worker.memory_bytes) if growth else worker.memory_bytes

    def _follow_growth(
        self, workers: Iterable[Worker], by_driver: Container[str], devices: SharedDevices, now_s: float
    ) -> None:
        used = {gpu.index: use.used_bytes for gpu, use, why in devices if why not in (NOT_READ, UNREADABLE)}
        self._growth = {each.name: self._growth[each.name] for each in workers if each.name in self._growth}
        for worker in workers:
            others = (each for each in self._given.values() if each.name != worker.name)
            beside = frozenset(each.name for each in others if set(each.gpus) & set(worker.gpus))
            left = any(set(each.bytes) & set(worker.gpus) for each in self._left.values())
            growth = self._growth.get(worker.name)
            if growth is None:
                before = {index: self._used[index] for index in worker.gpus if index in self._used}
                is_known = len(before) == len(worker.gpus) and not left
                growth = self._growth[worker.name] = _Growth(before, beside, is_over=not is_known)
            settled = worker.state is WorkerState.READY and now_s - worker.since_s > SETTLE_S
            growth.is_over |= settled or left or beside != growth.beside
            is_measured = worker.component in by_driver and worker.state is WorkerState.READY
            if is_measured and not growth.is_over:
                grown = {index: used.get(index, 0) - amount for index, amount in growth.before.items()}
                growth.bytes = {index: max(each, growth.bytes.get(index, 0)) for index, each in grown.items()}
                growth.bytes = {index: each for index, each in growth.bytes.items() if each > LEFTOVER_BYTES}
        self._used = used

    def _host_device(self, workers: Sequence[Worker], now_s: float) -> Device:
        """Return the host as a device; read again every HOST_POLL_S, and when the workers' pids changed."""
        pids = [each.pid for each in workers if each.pid]
        host = self._host
        if host is None or now_s - self._host_read_s >= HOST_POLL_S or set(pids) != set(host.held):
            host = self._host = replace(self._read_host(pids), saved_bytes=self._saved_bytes())
            self._host_read_s = now_s
        ours = sum(each.own_bytes for each in host.held.values())
        foreign = max(0, host.box.total_bytes - host.box.available_bytes - ours - host.saved_bytes)
        return self._device(HOST, host.box.total_bytes, foreign)

    def _device(self, index: int, total_bytes: int, foreign_bytes: int, unusable: str = "") -> Device:
        """Return the device limited to our budget: others' memory counts only as far as it reaches into
        it."""
        allowed = min(total_bytes, self._budget_bytes or total_bytes)
        return Device(index, allowed, max(0, foreign_bytes - (total_bytes - allowed)), unusable)
