"""The GPUs that the fleet may use: claimed by no other deployment, and used by nobody's processes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from dynaplan.fleet.gpus import Gpu
from dynaplan.fleet.plugin.gpu_claims import GpuClaims
from dynaplan.fleet.plugin.gpu_memory import GpuMemory
from dynaplan.fleet.plugin.gpu_sharing import GpuSharing, SharingBounds
from dynaplan.fleet.rules.allocation import choose_gpus
from dynaplan.fleet.rules.busy_gpus import by_reason
from dynaplan.graph.lifecycle import HOLDS_GPUS, Worker, WorkerState

TAKEN_MEANWHILE = "claimed by another deployment a moment ago"


class FleetGpus:
    """Joins the claims and the memory; ``memory`` is None with ``--use-busy-gpus``, and only claims count.

    ``sharing`` is None where GPUs are given to no other deployment and taken from none.
    """

    def __init__(
        self,
        inventory: Sequence[Gpu],
        claims: GpuClaims,
        memory: GpuMemory | None,
        sharing: GpuSharing | None = None,
    ) -> None:
        self._sharing = sharing
        self._kept: Mapping[int, str] = {}
        self._reserved: Mapping[int, str] = {}
        self._inventory = inventory
        self._claims = claims
        self._memory = memory
        self._claimed: dict[int, str] = {}

    def reserve(self, reserved: Mapping[int, str]) -> None:
        """Have these GPUs reserved from now on, and no others: index -> the reason.

        They stay claimed, so that no other deployment takes them.
        """
        indices = {gpu.index for gpu in self._inventory}
        self._reserved = {index: why for index, why in reserved.items() if index in indices}

    def unusable(self, fleet: Sequence[Worker]) -> dict[int, str]:
        """Return the GPUs that no further worker may get now: index -> the holder, in words."""
        self._claimed = self._claims.foreign()
        return {**self._busy(fleet), **self._reserved, **self._claimed}

    def bounds(self, fleet: Sequence[Worker], desired: Mapping[str, int], is_new: bool) -> SharingBounds:
        """Return what the other deployments of this user make of it; see ``GpuSharing.bounds``."""
        if self._sharing is None:
            return SharingBounds()
        left_out = {**self._busy(fleet), **self._reserved}
        bounds = self._sharing.bounds(fleet, desired, left_out, is_new)
        self._kept = bounds.kept
        return bounds

    def claim_for(self, fleet: Iterable[Worker]) -> dict[int, str]:
        """Claim the GPUs of these workers; return the ones that could not be obtained, with the reason."""
        missed = self._claims.claim_for(fleet, self._reserved)
        return dict.fromkeys(missed - self._reserved.keys(), TAKEN_MEANWHILE)

    def release_beyond(self, fleet: Iterable[Worker]) -> None:
        """Give back every claim on a GPU that none of these workers holds."""
        self._claims.release_beyond(fleet, self._reserved)

    def hindered(self, fleet: Sequence[Worker]) -> dict[str, str]:
        """Return the workers without a process whose own GPUs are still in use: name -> why."""
        busy = self._busy(fleet)
        return {
            worker.name: "; ".join(by_reason({i: busy[i] for i in worker.gpus if i in busy}, self._inventory))
            for worker in fleet
            if worker.state is WorkerState.STARTING and not worker.pid and busy.keys() & set(worker.gpus)
        }

    def moved(
        self, fleet: Sequence[Worker], overdue: Collection[str], unusable: Mapping[int, str]
    ) -> tuple[Worker, ...]:
        """Return the fleet in which overdue workers without a process have other GPUs, if some are free."""
        moved = list(fleet)
        for place, worker in enumerate(fleet):
            if worker.name in overdue and worker.state is WorkerState.STARTING and not worker.pid:
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
        taken = held | self._busy(fleet).keys() | self._claimed.keys() | self._kept.keys()
        taken |= self._reserved.keys()
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
