"""The course of a simulation, for drawings: the fleet, the queues and the decisions, thinned to constant
memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dynaplan.fleet.counts import Targets
from dynaplan.fleet.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.service import SimulatedService

FLAP_S = 300.0
"""Seconds within which a change that takes back another one of the same role counts as a flap."""

MOST_ITEMS = 2000
"""The largest number of moments, fleet changes or decisions that are kept: more than a page shows."""


@dataclass(frozen=True)
class Moment:
    """The service when the policy looked, ``at_s`` seconds; ``arrived`` counts all requests until then."""

    at_s: float
    in_service: int
    prefill_queue: int
    arrived: int


@dataclass(frozen=True)
class FleetChange:
    """The fleet from ``at_s`` on: the workers that get requests, the workers wanted, and the GPUs held."""

    at_s: float
    serving: Targets
    wanted: Targets
    gpus: float


@dataclass(frozen=True)
class ScaleEvent:
    """A decision that changed something, and its reason in the policy's words; "" where it gives none."""

    at_s: float
    before: Targets
    after: Targets
    why: str


class Timed(Protocol):
    """Whatever has a moment in virtual time."""

    @property
    def at_s(self) -> float:
        """The moment, in seconds since the simulation began."""
        ...


T = TypeVar("T", bound=Timed)


class Thinned(Generic[T]):
    """Keeps the last item of every stretch of time, and doubles the stretches when there are too many
    items."""

    def __init__(self, most: int = MOST_ITEMS) -> None:
        self._most = most
        self._stretch_s = 0.0
        self._items: list[T] = []

    def add(self, item: T) -> None:
        """Add an item, no earlier than the one before."""
        if self._items and self._stretch_of(self._items[-1]) == self._stretch_of(item):
            self._items[-1] = item
            return
        self._items.append(item)
        if len(self._items) > self._most:
            span_s = item.at_s - self._items[0].at_s
            self._stretch_s = max(2 * self._stretch_s, 2 * span_s / self._most)
            self._items = list({self._stretch_of(kept): kept for kept in self._items}.values())

    def items(self) -> tuple[T, ...]:
        """Return the kept items, the earliest first."""
        return tuple(self._items)

    def _stretch_of(self, item: T) -> float:
        return item.at_s // self._stretch_s if self._stretch_s else item.at_s


class ChangeCount:
    """Counts changes of the numbers of workers, one for each role, and the flaps among them."""

    def __init__(self) -> None:
        self.scale_events = 0
        self.flaps = 0
        self._last: dict[Role, tuple[int, float]] = {}

    def count(self, before: Targets, after: Targets, at_s: float) -> None:
        """Count a change, no earlier than the one counted last."""
        for role in SCALED_ROLES:
            change = after.of(role) - before.of(role)
            if change:
                self.scale_events += 1
                last, last_s = self._last.get(role, (0, 0.0))
                self.flaps += last * change < 0 and at_s - last_s <= FLAP_S
                self._last[role] = change, at_s


class History:
    """Records a service that has just begun; the caller counts ``arrived``."""

    def __init__(self, service: SimulatedService) -> None:
        self._service = service
        self._wanted = service.pools.wanted
        self.arrived = 0
        self.changes = ChangeCount()
        self.moments: Thinned[Moment] = Thinned()
        self.fleet: Thinned[FleetChange] = Thinned()
        self.events: Thinned[ScaleEvent] = Thinned()
        service.pools.on_change = self._fleet_changed
        self._fleet_changed(service.now_s)

    def note(self, why: str) -> None:
        """Record the service after a look of the policy, whose last change had that reason."""
        service = self._service
        at_s, wanted = service.now_s, service.pools.wanted
        if wanted != self._wanted:
            self.events.add(ScaleEvent(at_s, self._wanted, wanted, why))
            self.changes.count(self._wanted, wanted, at_s)
            self._wanted = wanted
        self.moments.add(Moment(at_s, service.in_service, service.queue_depth, self.arrived))

    def _fleet_changed(self, at_s: float) -> None:
        pools = self._service.pools
        serving = Targets(len(pools.serving(Role.PREFILL)), len(pools.serving(Role.DECODE)))
        self.fleet.add(FleetChange(at_s, serving, pools.wanted, pools.held_gpus))
