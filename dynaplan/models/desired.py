"""What the fleet is to have of models that are loaded on request.

A module of its own, since a fleet without such models is reconciled, too, and need not import the rest of
``models``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dynaplan.graph.lifecycle import Worker, WorkerState

if TYPE_CHECKING:
    from dynaplan.models.model import Load


@dataclass(frozen=True)
class DesiredModels:
    """What components of models are to have: numbers of workers, and places for those that start.

    ``leaving`` has the reason for each worker that leaves, ``to_sleep`` the level of those that are put to
    sleep, ``to_wake`` those that are woken: all by the worker's name.
    """

    workers: Mapping[str, int] = field(default_factory=dict)
    placements: Mapping[str, Load] = field(default_factory=dict)
    leaving: Mapping[str, str] = field(default_factory=dict)
    to_sleep: Mapping[str, str] = field(default_factory=dict)
    to_wake: frozenset[str] = frozenset()

    def sleep_orders(self, fleet: Iterable[Worker]) -> list[tuple[int, str]]:
        """Return the instances that are asked to sleep now, each with its level."""
        return [
            (each.instance_id, self.to_sleep[each.name])
            for each in _registered(fleet)
            if each.name in self.to_sleep
        ]

    def wake_orders(self, fleet: Iterable[Worker]) -> list[int]:
        """Return the instances that are asked to wake now."""
        return [each.instance_id for each in _registered(fleet) if each.name in self.to_wake]

    def without(self, gpus: Container[int]) -> DesiredModels:
        """Return a copy without the places on these GPUs: somebody else was faster."""
        kept = {
            name: place
            for name, place in self.placements.items()
            if not any(each in gpus for each in place.gpus)
        }
        return replace(self, placements=kept) if kept != self.placements else self


def _registered(fleet: Iterable[Worker]) -> list[Worker]:
    return [each for each in fleet if each.state is WorkerState.READY and each.instance_id]


NO_MODELS = DesiredModels()
