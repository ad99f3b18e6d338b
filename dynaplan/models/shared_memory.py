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

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from dynaplan.contract.gpus import BEING_FREED_S, NOT_READ, UNREADABLE, Gpu, GpuUse
from dynaplan.graph.lifecycle import Worker, WorkerState
from dynaplan.models.model import HOST, Device

LEFTOVER_BYTES = 2**28
"""Memory of a GPU that is not told from none: a driver's own tables move."""

LOADING = (WorkerState.STARTING, WorkerState.BACKOFF)
"""The states of a worker that may not have taken yet what it was given."""

SETTLE_S = 10.0
"""For how long after its load a worker's memory is still compared with what was in use before."""

SharedGpus = Sequence[tuple[Gpu, GpuUse, str]]
"""Each GPU, its use, and why nothing may be placed there, or empty."""


@dataclass(frozen=True)
class HostMemory:
    """The host's memory at one moment, in bytes.

    ``resident_bytes`` are all pages that each worker has in memory, by pid; ``own_bytes`` are those of all of
    them that the kernel cannot reclaim. ``saved_bytes`` is what saved KV entries take.
    """

    total_bytes: int
    available_bytes: int
    resident_bytes: Mapping[int, int] = field(default_factory=dict)
    own_bytes: int = 0
    saved_bytes: int = 0

    @property
    def foreign_bytes(self) -> int:
        return max(0, self.total_bytes - self.available_bytes - self.own_bytes - self.saved_bytes)


@dataclass(frozen=True)
class _Leftover:
    """What a worker that left at ``gone_s`` has not given back, by GPU, and what was foreign there before."""

    component: str
    bytes: Mapping[int, int]
    foreign_before: Mapping[int, int]
    gone_s: float


@dataclass(frozen=True)
class _Growth:
    """What was in use of a worker's GPUs before its load, beside which workers, and what it took since.

    ``is_over``: what grows from now on is not its load's.
    """

    before: Mapping[int, int]
    beside: frozenset[str]
    bytes: Mapping[int, int] = field(default_factory=dict)
    is_over: bool = False


@dataclass(frozen=True)
class SharedMemory:
    """The memory after a pass: the ``devices`` as the rules see them, and what the next pass needs of it."""

    devices: tuple[Device, ...] = ()
    _host: HostMemory | None = None
    _given: Mapping[str, Worker] = field(default_factory=dict)
    _foreign: Mapping[int, int] = field(default_factory=dict)
    _left: Mapping[str, _Leftover] = field(default_factory=dict)
    _growth: Mapping[str, _Growth] = field(default_factory=dict)
    _used: Mapping[int, int] = field(default_factory=dict)

    def follow(
        self,
        workers: Iterable[Worker],
        gpus: SharedGpus,
        host: HostMemory | None,
        now_s: float,
        *,
        kept_bytes: Mapping[str, int] | None = None,
        by_driver: Container[str] = (),
        budget_bytes: int = 0,
    ) -> SharedMemory:
        """Return the memory after the next pass, from the workers and the use of memory as they are now.

        ``host`` is None where no model is in the host's memory. ``kept_bytes`` is what sleepers keep of a
        GPU, by worker. ``by_driver`` are the components whose workers hold what the driver says. Of each
        device ``budget_bytes`` may be taken; 0 is all of it.
        """
        kept, found = kept_bytes or {}, list(workers)
        given = {
            each.name: replace(each, memory_bytes=kept.get(each.name, each.memory_bytes))
            for each in found
            if each.gpus and each.memory_bytes
        }
        loading = {index for each in found if each.state in LOADING for index in each.gpus}
        unread = {gpu.index for gpu, _, why in gpus if why in (NOT_READ, UNREADABLE)}
        used = {gpu.index: use.used_bytes for gpu, use, _ in gpus}
        excess = {index: max(0, each - self._taken(given, index)) for index, each in used.items()}
        left = self._leftovers(given, excess, unread, now_s, kept)
        unsettled = unread | {index for each in left.values() for index in each.bytes}
        foreign = {
            index: max(each, self._foreign.get(index, 0)) if index in loading else each
            for index, each in excess.items()
            if index not in unsettled
        }
        foreign = {**self._foreign, **foreign}
        used = {index: each for index, each in used.items() if index not in unread}
        after = replace(self, _host=host, _given=given, _foreign=foreign, _left=left)
        growth = {name: after._grown(each, used, by_driver, now_s) for name, each in given.items()}
        devices = [
            (gpu.index, gpu.memory_bytes, foreign.get(gpu.index, 0), "" if why == NOT_READ else why)
            for gpu, _, why in gpus
        ]
        if host:
            devices.append((HOST, host.total_bytes, host.foreign_bytes, ""))
        within = tuple(_device(*each, budget_bytes) for each in devices)
        return replace(after, devices=within, _growth=growth, _used=used)

    def held(self, worker: Worker | None, component: str) -> Mapping[int, int]:
        """Return the bytes that were measured for the worker, by device; empty where none were.

        A sleeper holds what it keeps and what has not come back. Without a worker (None): what gone workers
        of the component have not given back.
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
        resident_bytes = self._host.resident_bytes.get(worker.pid)
        return {HOST: resident_bytes} if resident_bytes else {}

    def _leftovers(
        self,
        given: Mapping[str, Worker],
        excess: Mapping[int, int],
        unread: Container[int],
        now_s: float,
        sleepers: Container[str],
    ) -> dict[str, _Leftover]:
        """Return what workers that have gone, or fallen asleep, have not given back yet, by worker."""
        left = dict(self._left)
        for name, before in self._given.items():
            now = given.get(name)
            if now is None or (name in sleepers and now.memory_bytes != before.memory_bytes):
                freed = dict.fromkeys(before.gpus, before.memory_bytes - (now.memory_bytes if now else 0))
                growth = self._growth.get(name)
                foreign = {**self._foreign, **(growth.before if growth and not growth.beside else {})}
                left[name] = _Leftover(before.component, freed, foreign, now_s)
        for name, each in list(left.items()):
            still = {
                index: held
                if index in unread
                else min(held, excess[index] - each.foreign_before.get(index, 0))
                for index, held in each.bytes.items()
                if index in excess
            }
            left[name] = replace(each, bytes=still)
            is_back = all(held < LEFTOVER_BYTES for held in still.values())
            if is_back or now_s - each.gone_s > BEING_FREED_S or (name in given and name not in sleepers):
                del left[name]
        return left

    def _taken(self, given: Mapping[str, Worker], index: int) -> int:
        """Return the bytes of that GPU that our workers hold: measured, or else as given to them."""
        return sum(
            growth.bytes.get(index, each.memory_bytes)
            if (growth := self._growth.get(name))
            else each.memory_bytes
            for name, each in given.items()
            if index in each.gpus
        )

    def _grown(
        self, worker: Worker, used: Mapping[int, int], by_driver: Container[str], now_s: float
    ) -> _Growth:
        others = (each for each in self._given.values() if each.name != worker.name)
        beside = frozenset(each.name for each in others if set(each.gpus) & set(worker.gpus))
        left = any(set(each.bytes) & set(worker.gpus) for each in self._left.values())
        growth = self._growth.get(worker.name)
        if growth is None:
            before = {index: self._used[index] for index in worker.gpus if index in self._used}
            growth = _Growth(before, beside, is_over=len(before) != len(worker.gpus))
        is_ready = worker.state is WorkerState.READY
        is_settled = is_ready and now_s - worker.since_s > SETTLE_S
        if growth.is_over or is_settled or left or beside != growth.beside:
            return replace(growth, is_over=True)
        if not is_ready or worker.component not in by_driver:
            return growth
        grown = {
            index: max(used.get(index, 0) - before_bytes, growth.bytes.get(index, 0))
            for index, before_bytes in growth.before.items()
        }
        return replace(growth, bytes={i: each for i, each in grown.items() if each > LEFTOVER_BYTES})


def _device(index: int, total_bytes: int, foreign_bytes: int, unusable: str, budget_bytes: int) -> Device:
    """Return the device limited to our budget: others' memory counts only as far as it reaches into it."""
    allowed = min(total_bytes, budget_bytes or total_bytes)
    return Device(index, allowed, max(0, foreign_bytes - (total_bytes - allowed)), unusable)
