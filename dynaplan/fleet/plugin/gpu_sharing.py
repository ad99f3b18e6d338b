"""The fleet's part in sharing the GPUs of the box with the other deployments of its user.

No deployment talks to another: each publishes beside its claims what it holds and lacks, reads what the
others have published, and lets go by itself what ``fleet/rules/gpu_sharing.py`` says that it must.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynaplan.fleet.gpus import Gpu, GpuShare, NodeGpus
from dynaplan.fleet.ports import Claims
from dynaplan.fleet.rules import gpu_sharing
from dynaplan.graph.lifecycle import COUNTS, HOLDS_GPUS, Worker, WorkerState
from dynaplan.graph.model import GraphSpec
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

BEING_FREED_S = 30.0
"""Time for which the memory of a GPU that was claimed is thought to be that claim's, in seconds."""


@dataclass(frozen=True)
class SharingBounds:
    """The bounds that sharing sets to the fleet in one pass.

    ``given`` is component -> why one of its workers leaves for another deployment; ``kept`` are free GPUs
    that are for others: index -> why; ``outlook`` says from where missing GPUs are to come.
    """

    given: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[int, str] = field(default_factory=dict)
    outlook: str = ""


class GpuSharing:
    """Publishes what one deployment holds and lacks, and says what it must give; ``base`` never changes."""

    def __init__(
        self, base: GpuShare, graph: GraphSpec, inventory: Sequence[Gpu], claims: Claims, clock: Clock
    ) -> None:
        self._base = base
        self._graph = graph
        self._inventory = inventory
        self._claims = claims
        self._clock = clock
        self._failing: set[str] = set()
        self._claimed_at_s: dict[str, float] = {}

    def bounds(
        self, fleet: Sequence[Worker], desired: Mapping[str, int], busy: Mapping[int, str], is_new: bool
    ) -> SharingBounds:
        """Publish, and return what the fleet is to do; nothing while the claims cannot be used.

        ``desired`` is component -> number of workers; ``busy`` are the GPUs whose memory is in use;
        ``is_new`` tells that the numbers were written anew: what has failed is tried again.
        """
        self._note_failing(fleet, desired, is_new)
        decided = SharingBounds()

        def share(seen: NodeGpus) -> GpuShare:
            nonlocal decided
            base = replace(self._base, held=seen.held, left_out=self._left_out(seen.claimed, busy))
            own = gpu_sharing.published(base, self._graph, fleet, desired, self._inventory, self._failing)
            # A GPU whose worker is gone is claimed until this pass ends, and reconciling takes it for free.
            held = {index for each in fleet if each.state in HOLDS_GPUS for index in each.gpus}
            idle = {gpu.uuid for gpu in self._inventory if gpu.index not in held} & seen.held
            decided, own = self._decided(own, seen, seen.claimed - idle)
            return own

        try:
            self._claims.publish(share)
        except DeploymentError as error:
            log.warning("%s", error)
            return SharingBounds()
        return decided

    def _decided(
        self, own: GpuShare, seen: NodeGpus, in_use: frozenset[str]
    ) -> tuple[SharingBounds, GpuShare]:
        everybody = (own, *seen.shares)
        step = gpu_sharing.transfer(everybody, seen.claimed)
        back = gpu_sharing.kept_back(own, everybody, seen.claimed)
        free = [gpu for gpu in self._inventory if gpu.uuid in back.visible - in_use]
        bounds = SharingBounds(
            kept={gpu.index: back.why for gpu in free[max(0, len(free) - back.number) :]},
            outlook=gpu_sharing.outlook(own, everybody, seen.claimed),
        )
        if step is None or step.giver is not own:
            return bounds, own
        return replace(bounds, given={step.pool.component: step.why}), gpu_sharing.after(step)

    def _left_out(self, claimed: frozenset[str], busy: Mapping[int, str]) -> frozenset[str]:
        """The GPUs that other programs use: a worker's memory goes a little later than its claim."""
        now_s = self._clock.now_s()
        self._claimed_at_s |= dict.fromkeys(claimed, now_s)
        return frozenset(
            gpu.uuid
            for gpu in self._inventory
            if gpu.index in busy
            and now_s - self._claimed_at_s.get(gpu.uuid, now_s - BEING_FREED_S) >= BEING_FREED_S
        )

    def _note_failing(self, fleet: Sequence[Worker], desired: Mapping[str, int], is_new: bool) -> None:
        """Remember the components that have failed, until all their workers are ready or they are retried."""
        if is_new:
            self._failing.clear()
        for name in desired:
            states = [each.state for each in fleet if each.component == name and each.state in COUNTS]
            if WorkerState.FAILED in states:
                self._failing.add(name)
            elif len(states) >= desired[name] and set(states) <= {WorkerState.READY}:
                self._failing.discard(name)
