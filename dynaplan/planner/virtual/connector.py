"""The virtual connector: decisions as keys that anybody may carry out.

Source: the VirtualConnector of the SLA planner's documentation; the keys are in
``dynaplan.contract.store_keys``.
On one box the fleet plugin is at the other end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from dynaplan.contract.counts import FleetCounts, PoolSizes
from dynaplan.contract.holds import HOLDS, RoleHolds
from dynaplan.contract.store_keys import (
    DesiredCounts,
    by_name,
    fleet_key,
    planner_prefix,
    scaling_key,
    scaling_prefix,
)
from dynaplan.planner.deployment import DeployedComponents, missing_workers
from dynaplan.planner.model import Decision
from dynaplan.planner.ports import Registrations
from dynaplan.planner.timing import LOST_HOLDS_S
from dynaplan.store.model import KeyValue, Transaction
from dynaplan.store.port import KeyValueStore
from dynaplan.util.documents import parse_object
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import TemporaryError

log = logging.getLogger(__name__)


class VirtualConnector:
    """Writes desired counts into the key-value store; see ``dynaplan.planner.ports.Connector``.

    ``registrations`` count the workers where no ``serve`` publishes its fleet, and name the components.
    ``unix_time_s`` is the wall clock that ends holds. Holds that were there and are gone are waited for
    during ``lost_for_s`` seconds: nobody ends a hold by deleting it, so an etcd without its data has lost
    them, and the fleet plugin writes them again.
    """

    def __init__(
        self,
        store: KeyValueStore,
        namespace: str,
        registrations: Registrations,
        unix_time_s: Callable[[], float] = time.time,
        lost_for_s: float = LOST_HOLDS_S,
    ) -> None:
        self._store = store
        self._namespace = namespace
        self._registrations = registrations
        self._unix_time_s = unix_time_s
        self._lost_for_s = lost_for_s
        self._ignored = ""
        self._seen_s: float | None = None
        self._done_id = -1

    async def fleet(self) -> FleetCounts:
        """The fleet as its ``serve`` publishes it, or else as it is registered."""
        item = await self._store.get(fleet_key(self._namespace))
        if item is None:
            return self._registrations.registered()
        try:
            return FleetCounts.from_json(parse_object(item.value))
        except ValueError as error:
            log.warning("%s is not a fleet (%s): counting registrations instead", item.key, error)
            return self._registrations.registered()

    async def desired(self) -> DesiredCounts:
        """The desired counts and the decision they belong to."""
        return self._counts(await self._read())

    async def holds(self) -> RoleHolds:
        """The holds in force, those with hours of the day only while these are open.

        A value that cannot be read holds nothing, and is logged once. Raises TemporaryError while holds that
        were there are missing in the store.
        """
        return self._holds(await self._read())

    async def apply(self, decision: Decision) -> int:
        """Write the desired counts in one transaction.

        Raises TemporaryError when what was read has changed.
        """
        items = await self._read()
        now = self._counts(items)
        refuse_when_changed(decision, now, self._holds(items))
        prefix = planner_prefix(self._namespace)
        puts = {prefix + "num_decode_workers": str(decision.desired.decode), prefix + "decision_id": ""}
        if decision.desired.prefill or decision.current.prefill or now.num_prefill_workers >= 0:
            # An aggregated graph has no prefill workers to ask for.
            puts[prefix + "num_prefill_workers"] = str(decision.desired.prefill)
        puts[prefix + "decision_id"] = str(now.next_decision_id)
        held = scaling_key(self._namespace, HOLDS)
        unset = dict.fromkeys((*puts, prefix + "scaled_decision_id", held), 0)
        expected = unset | {item.key: item.revision for item in items}
        if not await self._store.commit(Transaction(expected=expected, puts=puts)):
            raise TemporaryError("the desired counts are being changed by somebody else")
        return now.next_decision_id

    async def components(self) -> DeployedComponents:
        missing = missing_workers(await self.fleet(), await self.desired())
        return DeployedComponents(tuple(self._registrations.components()), missing)

    async def _read(self) -> tuple[KeyValue, ...]:
        return await self._store.list(scaling_prefix(self._namespace))

    def _counts(self, items: tuple[KeyValue, ...]) -> DesiredCounts:
        """Read the counts; an acknowledgement that was seen holds when its key is gone.

        Dynamo's client has written that key under its own lease.
        """
        counts = DesiredCounts.from_keys(self._namespace, {item.key: item.value for item in items})
        if not counts.is_pending:
            self._done_id = counts.decision_id
        elif counts.decision_id == self._done_id:
            return replace(counts, scaled_decision_id=self._done_id)
        return counts

    def _holds(self, items: tuple[KeyValue, ...]) -> RoleHolds:
        """Read the holds; raises TemporaryError for a while when their key was there and is gone."""
        key = scaling_key(self._namespace, HOLDS)
        text = by_name(self._namespace, {item.key: item.value for item in items}).get(HOLDS, "")
        if text:
            self._seen_s = time.monotonic()
        elif self._seen_s is not None and time.monotonic() - self._seen_s < self._lost_for_s:
            raise TemporaryError(f"{key} is gone: the store has lost it, and it is written again")
        try:
            return RoleHolds.from_text(text).in_force(self._unix_time_s(), wall_clock)
        except ValueError as error:
            if text != self._ignored:
                log.warning("ignoring %s: %s", key, error)
            self._ignored = text
            return RoleHolds()


def refuse_when_changed(decision: Decision, now: DesiredCounts, holds: RoleHolds) -> None:
    """Raise TemporaryError when the desired counts, or the holds, have changed since the decision began."""
    current = decision.current
    asked = PoolSizes(
        now.num_prefill_workers if now.num_prefill_workers >= 0 else current.prefill,
        now.num_decode_workers if now.num_decode_workers >= 0 else current.decode,
    )
    if asked != current:
        raise TemporaryError(f"somebody else asked for {asked} meanwhile; this decision began with {current}")
    if holds.beside(current).bounded(decision.desired) != decision.desired:
        raise TemporaryError(f"{decision.desired} was decided before a hold was made that does not allow it")
