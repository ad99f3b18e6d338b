"""The fleet's GPUs, claimed from the other deployments of this machine before a worker gets them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from dynaplan.fleet.gpus import Gpu
from dynaplan.fleet.ports import Claims
from dynaplan.graph.lifecycle import HOLDS_GPUS, Worker
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)


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

    def foreign(self) -> dict[int, str]:
        """Return the GPUs that other deployments hold at this moment: index -> the holder, in words."""
        try:
            holders = self._claims.foreign(self._index_of)
            self._foreign = {self._index_of[uuid]: holder for uuid, holder in holders.items()}
        except DeploymentError as error:
            log.warning("%s", error)
        return dict(self._foreign)

    def claim_for(self, fleet: Iterable[Worker], beside: Iterable[int] = ()) -> frozenset[int]:
        """Claim the GPUs of these workers, and those ``beside``; return the ones that were not obtained."""
        wanted = _held_by(fleet) | frozenset(beside)
        new = wanted - (self._held or frozenset())
        if not new:
            return frozenset()
        try:
            claimed = self._claims.claim([self._uuid_of[index] for index in new])
        except DeploymentError as error:
            log.warning("%s", error)
            return new
        obtained = frozenset(self._index_of[uuid] for uuid in claimed)
        self._held = (self._held or frozenset()) | obtained
        return new - obtained

    def release_beyond(self, fleet: Iterable[Worker], beside: Iterable[int] = ()) -> None:
        """Give back every GPU that none of these workers holds and that is not ``beside`` them."""
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


def _held_by(fleet: Iterable[Worker]) -> frozenset[int]:
    return frozenset(index for worker in fleet if worker.state in HOLDS_GPUS for index in worker.gpus)
