"""The twin of the planner's Observer, as far as it tells what is registered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynaplan.contract.counts import FleetCounts
from dynaplan.planner.deployment import ScaledComponent


@dataclass(frozen=True)
class FakeRegistrations:
    """See ``dynaplan.planner.ports.Registrations``; both values are asked for anew each time."""

    fleet: Callable[[], FleetCounts] = FleetCounts
    deployed: Callable[[], Sequence[ScaledComponent]] = tuple

    def registered(self) -> FleetCounts:
        return self.fleet()

    def components(self) -> Sequence[ScaledComponent]:
        return self.deployed()
