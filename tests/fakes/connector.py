"""A connector in memory, in the hands of a test."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.contract.counts import FleetCounts
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.planner.deployment import DeployedComponents, ScaledComponent, missing_workers
from dynaplan.planner.model import Decision
from dynaplan.planner.virtual.connector import refuse_when_changed
from dynaplan.util.errors import StoreUnavailable


class MemoryConnector:
    """The twin of ``VirtualConnector``: what it is asked for waits until ``settle`` carries it out.

    Setting ``is_available`` to False makes it raise StoreUnavailable, as when the store is away.
    """

    def __init__(self, fleet: FleetCounts | None = None, desired: DesiredCounts | None = None) -> None:
        self.is_available = True
        self._fleet = fleet or FleetCounts()
        self._desired = desired or DesiredCounts()
        self._holds = RoleHolds()
        self.deployed: list[ScaledComponent] = []

    async def fleet(self) -> FleetCounts:
        """The fleet that was set."""
        self._enter()
        return self._fleet

    async def desired(self) -> DesiredCounts:
        """The counts that were asked for last."""
        self._enter()
        return self._desired

    async def holds(self) -> RoleHolds:
        """The holds that were set."""
        self._enter()
        return self._holds

    async def apply(self, decision: Decision) -> int:
        """Ask for the desired counts."""
        self._enter()
        refuse_when_changed(decision, self._desired, self._holds)
        desired, now = decision.desired, self._desired
        has_prefill = desired.prefill or decision.current.prefill or now.num_prefill_workers >= 0
        self._desired = replace(
            now,
            num_prefill_workers=desired.prefill if has_prefill else -1,
            num_decode_workers=desired.decode,
            decision_id=now.next_decision_id,
        )
        return self._desired.decision_id

    async def components(self) -> DeployedComponents:
        """The components that were set, and the workers that are missing."""
        self._enter()
        return DeployedComponents(tuple(self.deployed), missing_workers(self._fleet, self._desired))

    def set_fleet(self, fleet: FleetCounts) -> None:
        """The workers there are from now on."""
        self._fleet = fleet

    def set_desired(self, desired: DesiredCounts) -> None:
        """What somebody else asks for."""
        self._desired = desired

    def set_holds(self, holds: RoleHolds) -> None:
        """What a person fixes or bounds from now on."""
        self._holds = holds

    def settle(self) -> None:
        """Carry out what was asked for: everybody is ready, and the decision is acknowledged."""
        desired = self._desired
        self._desired = replace(
            desired, scaled_decision_id=max(desired.decision_id, desired.scaled_decision_id)
        )
        prefill, decode = max(0, desired.num_prefill_workers), max(0, desired.num_decode_workers)
        self.set_fleet(
            replace(
                self._fleet,
                prefill=replace(self._fleet.prefill, ready=prefill, starting=0, draining=0),
                decode=replace(self._fleet.decode, ready=decode, starting=0, draining=0),
            )
        )

    def _enter(self) -> None:
        if not self.is_available:
            raise StoreUnavailable("the fleet is away")
