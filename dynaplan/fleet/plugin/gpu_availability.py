"""The GPUs that the fleet's next worker may get: claimed by no other deployment, not busy, not reserved.

1. Claims (``GpuClaims``): a GPU belongs to the deployment of the machine that was first to claim it.
2. Memory (``GpuMemory``): a driver takes back the memory of a dead process in its own time, for seconds after
   the process is gone. So a GPU counts as free when it was seen empty after its last worker had gone. The
   driver is asked in a thread, since it may hang with a broken GPU; when no answer comes the GPUs count as
   free, as their claims say. A GPU that alone cannot be read is broken, and does not.
3. Reservations: GPUs that a person has taken from the deployment. They stay claimed.

``GpuAvailability`` joins the three; docs/decisions/0028 says why.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from dynaplan.contract.gpus import (
    BEING_FREED_S,
    NOT_READ,
    UNREADABLE,
    Gpu,
    GpuUse,
    busy_gpus,
    by_reason,
    is_unreadable,
)
from dynaplan.fleet.gpu_claims import Claims
from dynaplan.fleet.rules.allocation import choose_gpus
from dynaplan.graph.lifecycle import HOLDS_GPUS, Worker, WorkerState
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

MEMORY_POLL_S = 2.0
"""Longest time between two reads of the memory, in seconds."""

DRIVER_TIMEOUT_S = 10.0
"""Time after which a driver that does not answer is not waited for, in seconds."""

MOVED_BYTES = 2**28
"""The change of a shared GPU's memory in bytes after which it is decided again what fits there."""

NEVER_S = -math.inf

TAKEN_MEANWHILE = "claimed by another deployment a moment ago"


class GpuClaims:
    """Claims the GPUs that workers hold and gives the others back; names GPUs by their indices.

    While the claims cannot be used, the last known ones stand and nothing new is obtained.
    """

    def __init__(self, claims: Claims, inventory: Sequence[Gpu]) -> None:
        self._claims = claims
        self._index_of = {gpu.uuid: gpu.index for gpu in inventory}
        self._uuid_of = {gpu.index: gpu.uuid for gpu in inventory}
        self._held: frozenset[int] | None = None
        self._foreign: dict[int, str] = {}

    def held_by_others(self) -> dict[int, str]:
        """Return the GPUs that other deployments hold at this moment: index -> a description of the
        holder."""
        try:
            holders = self._claims.held_by_others(self._index_of)
            self._foreign = {self._index_of[uuid]: holder for uuid, holder in holders.items()}
        except DeploymentError as error:
            log.warning("%s", error)
        return dict(self._foreign)

    def claim_for(self, fleet: Iterable[Worker], beside: Iterable[int] = ()) -> dict[int, str]:
        """Claim the GPUs of these workers, and those of ``beside``; return index -> why it was missed."""
        wanted = _held_by(fleet) | frozenset(beside)
        new = wanted - (self._held or frozenset())
        if not new:
            return {}
        try:
            claimed = self._claims.claim([self._uuid_of[index] for index in new])
        except DeploymentError as error:
            log.warning("%s", error)
            return dict.fromkeys(new, str(error.args[0]))
        obtained = frozenset(self._index_of[uuid] for uuid in claimed)
        self._held = (self._held or frozenset()) | obtained
        return dict.fromkeys(new - obtained, TAKEN_MEANWHILE)

    def release_unused(self, fleet: Iterable[Worker], beside: Iterable[int] = ()) -> None:
        """Give back every GPU that none of these workers holds and that is not among those ``beside``."""
        if self._held is None:
            self._held = frozenset(self._uuid_of)
        unused = self._held - _held_by(fleet) - frozenset(beside)
        if not unused:
            return
        try:
            self._claims.release([self._uuid_of[index] for index in unused])
            self._held -= unused
        except DeploymentError as error:
            log.warning("%s", error)


class GpuMemory:
    """Follows the memory in use. ``read`` blocks; ``wake`` is set when a GPU became free or busy."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        read: Callable[[], Mapping[int, GpuUse]],
        clock: Clock,
        wake: asyncio.Event,
    ) -> None:
        self._gpus = gpus
        self._read = read
        self._clock = clock
        self._wake = wake
        self._read_now = threading.Event()
        self._busy: Mapping[int, str] = {}
        self._uses: Mapping[int, GpuUse] = {}
        self._seen_at_s = NEVER_S
        self._is_silent = False
        self._asked_since_s: float | None = None
        self._held_at_s: dict[int, float] = {}
        self._left_at_s: dict[int, float] = {}
        self._holders: dict[int, set[str]] = {}

    async def run(self) -> None:
        """Read the memory for ever, every MEMORY_POLL_S, and at once when a GPU waits to be read."""
        loop, is_over = asyncio.get_running_loop(), threading.Event()

        def poll() -> None:
            while not is_over.is_set():
                self._read_now.clear()
                self._read_once(loop)
                self._read_now.wait(MEMORY_POLL_S)

        # Not asyncio's threads, for which a process waits at its end. A read without news stays in it: to
        # wake the loop each time would cost more than the read.
        threading.Thread(target=poll, name="GPU memory", daemon=True).start()
        try:
            await loop.create_future()
        finally:
            is_over.set()
            self._read_now.set()

    async def read_once(self) -> None:
        """Read the memory once, in a thread; returns only when the driver has answered."""
        await asyncio.to_thread(self._read_once, asyncio.get_running_loop())

    def _read_once(self, loop: asyncio.AbstractEventLoop) -> None:
        began_s = self._clock.now_s()
        try:
            uses = self._read()
            busy = busy_gpus(self._gpus, uses)
        except Exception:  # else nobody would ever read again
            log.exception("the memory of GPUs was not read")
            return
        if not uses and any(gpu.memory_bytes for gpu in self._gpus):
            return  # the driver does not answer
        if self._asked_since_s is None and busy.keys() == self._busy.keys() and not self._has_moved(uses):
            self._busy, self._uses, self._seen_at_s = busy, uses, began_s
            return
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._update, busy, uses, began_s)

    def _has_moved(self, uses: Mapping[int, GpuUse]) -> bool:
        """Tell whether the memory in use of a GPU with workers has changed since the last read."""
        return any(
            abs(use.used_bytes - self._uses.get(index, GpuUse()).used_bytes) >= MOVED_BYTES
            for index, use in uses.items()
            if index in self._holders
        )

    def _update(self, busy: Mapping[int, str], uses: Mapping[int, GpuUse], began_s: float) -> None:
        self._busy, self._uses, self._seen_at_s = busy, uses, began_s
        self._asked_since_s, self._is_silent = None, False
        self._wake.set()

    def shared_uses(self, fleet: Iterable[Worker]) -> dict[int, GpuUse | str]:
        """Return the memory use of each GPU, for placing several models on it, or why it is not known now.

        It is not known after a worker has left the GPU until the memory has been read again.
        """
        now_s = self._clock.now_s()
        holders: dict[int, set[str]] = {gpu.index: set() for gpu in self._gpus}
        for worker in fleet:
            for index in worker.gpus if worker.pid else ():
                holders.setdefault(index, set()).add(worker.name)
        for index, names in self._holders.items():
            if names - holders.get(index, set()):
                self._left_at_s[index] = now_s
        self._holders = holders
        unseen = {index for index, at_s in self._left_at_s.items() if at_s >= self._seen_at_s}
        if unseen and self._asked_since_s is None:
            self._asked_since_s = now_s
            self._read_now.set()
        is_silent = self._asked_since_s is not None and now_s - self._asked_since_s >= DRIVER_TIMEOUT_S
        uses: dict[int, GpuUse | str] = {}
        for gpu in self._gpus:
            if gpu.index in unseen and not is_silent:
                uses[gpu.index] = NOT_READ
            elif is_unreadable(gpu, self._uses):
                uses[gpu.index] = UNREADABLE
            else:
                uses[gpu.index] = self._uses.get(gpu.index, GpuUse())
        return uses

    def busy(self, fleet: Iterable[Worker]) -> dict[int, str]:
        """Return the GPUs that cannot be handed on now: index -> why. A running worker's own are left out.

        A GPU that has not been read since it was last held is among them, and is read as soon as possible.
        """
        now_s = self._clock.now_s()
        held = {index for worker in fleet if worker.pid for index in worker.gpus}
        self._held_at_s |= dict.fromkeys(held, now_s)
        busy = {index: why for index, why in self._busy.items() if index not in held}
        unseen = [
            gpu.index
            for gpu in self._gpus
            if gpu.index not in held and self._held_at_s.get(gpu.index, NEVER_S) >= self._seen_at_s
        ]
        if not unseen:
            return busy
        if self._asked_since_s is None:
            self._asked_since_s = now_s
            self._read_now.set()
        if now_s - self._asked_since_s < DRIVER_TIMEOUT_S:
            return {**dict.fromkeys(unseen, NOT_READ), **busy}
        if not self._is_silent:
            self._is_silent = True
            log.warning("the driver does not report the memory of GPUs: they count as free")
        return {}

    def is_being_freed(self, index: int) -> bool:
        """Tell whether a worker of this fleet held the GPU until a moment ago."""
        return self._clock.now_s() - self._held_at_s.get(index, NEVER_S) < BEING_FREED_S


class GpuAvailability:
    """Joins the claims and the memory; ``memory`` is None with ``--use-busy-gpus``, and only claims count."""

    def __init__(
        self,
        inventory: Sequence[Gpu],
        claims: GpuClaims,
        memory: GpuMemory | None,
    ) -> None:
        self._reserved: Mapping[int, str] = {}
        self._inventory = inventory
        self._claims = claims
        self._memory = memory
        self._claimed: dict[int, str] = {}

    def reserve(self, reserved: Mapping[int, str]) -> None:
        """Reserve exactly these GPUs from now on: index -> the reason.

        They stay claimed, so that no other deployment takes them.
        """
        indices = {gpu.index for gpu in self._inventory}
        self._reserved = {index: why for index, why in reserved.items() if index in indices}

    def unusable(self, fleet: Sequence[Worker]) -> dict[int, str]:
        """Return the GPUs that no further worker may get now: index -> a description of the holder."""
        self._claimed = self._claims.held_by_others()
        return {**self._busy(fleet), **self._reserved, **self._claimed}

    def claim_for(self, fleet: Iterable[Worker]) -> dict[int, str]:
        """Claim the GPUs of these workers; return the ones that could not be obtained, with the reason."""
        missed = self._claims.claim_for(fleet, self._reserved)
        return {index: why for index, why in missed.items() if index not in self._reserved}

    def release_unused(self, fleet: Iterable[Worker]) -> None:
        """Give back every claim on a GPU that none of these workers holds."""
        self._claims.release_unused(fleet, self._reserved)

    def shared_devices(self, fleet: Sequence[Worker]) -> tuple[tuple[Gpu, GpuUse, str], ...]:
        """Return each GPU for placing several models on it: the GPU, its use, and why nothing may be placed.

        The reason is empty where a model may be placed.
        """
        uses = self._memory.shared_uses(fleet) if self._memory else {}
        whole = {index for worker in fleet for index in worker.gpus if not worker.memory_bytes}
        taken = {**dict.fromkeys(whole, "it belongs to one worker"), **self._reserved, **self._claimed}
        devices = []
        for gpu in self._inventory:
            use = uses.get(gpu.index, GpuUse())
            unread = use if isinstance(use, str) else ""
            devices.append((gpu, GpuUse() if isinstance(use, str) else use, taken.get(gpu.index) or unread))
        return tuple(devices)

    def blocked(self, fleet: Sequence[Worker]) -> dict[str, str]:
        """Return the workers without a process whose own GPUs are still in use: name -> why."""
        busy = self._busy(fleet)
        return {
            worker.name: "; ".join(by_reason({i: busy[i] for i in worker.gpus if i in busy}, self._inventory))
            for worker in fleet
            if worker.state is WorkerState.STARTING and not worker.pid and not worker.memory_bytes
            if busy.keys() & set(worker.gpus)
        }

    def reallocated(
        self, fleet: Sequence[Worker], overdue: Collection[str], unusable: Mapping[int, str]
    ) -> tuple[Worker, ...]:
        """Return the fleet in which overdue workers without a process have other GPUs, if some are free."""
        moved = list(fleet)
        for place, worker in enumerate(fleet):
            is_movable = worker.state is WorkerState.STARTING and not worker.pid and not worker.memory_bytes
            if worker.name in overdue and is_movable:
                others = [*moved[:place], *moved[place + 1 :]]
                choice = choose_gpus(self._inventory, others, unusable, worker.gpu_request)
                if choice:
                    moved[place] = replace(worker, gpus=choice[0], gpu_share=choice[1])
        return tuple(moved)

    def total(self, fleet: Sequence[Worker]) -> int:
        """Return the number of GPUs that a planner may plan with.

        GPUs that other programs use or that are reserved are left out. The ones of other deployments are
        not: they come and go as those scale.
        """
        return len(self._inventory) - len(self._left_out(fleet))

    def free(self, fleet: Sequence[Worker]) -> list[int]:
        """Return the indices of the GPUs that a further worker may get now."""
        held = {index for worker in fleet if worker.state in HOLDS_GPUS for index in worker.gpus}
        taken = held | self._busy(fleet).keys() | self._claimed.keys() | self._reserved.keys()
        return [gpu.index for gpu in self._inventory if gpu.index not in taken]

    def left_out(self, fleet: Sequence[Worker]) -> list[str]:
        """Return a line for each reason for which GPUs are left out of ``total``."""
        return by_reason(self._left_out(fleet), self._inventory)

    def _left_out(self, fleet: Sequence[Worker]) -> dict[int, str]:
        held = {index for worker in fleet if worker.state in HOLDS_GPUS for index in worker.gpus}
        busy, memory = self._busy(fleet), self._memory
        others = busy.keys() - held - self._claimed.keys()
        in_use = {index: busy[index] for index in others if not (memory and memory.is_being_freed(index))}
        return {**in_use, **self._reserved}

    def _busy(self, fleet: Iterable[Worker]) -> dict[int, str]:
        return self._memory.busy(fleet) if self._memory else {}


def _held_by(fleet: Iterable[Worker]) -> frozenset[int]:
    return frozenset(index for worker in fleet if worker.state in HOLDS_GPUS for index in worker.gpus)
