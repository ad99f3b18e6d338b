"""The other end of the virtual connector: for a program that starts and stops workers as a planner asks.

::

    async with dynaplan.runtime.connect() as runtime:
        client = VirtualConnectorClient(runtime)
        while True:
            await client.wait()
            decision = await client.get()
            ...                     # bring about decision.num_prefill_workers, decision.num_decode_workers
            await client.complete(decision)

A decision is open until its number is acknowledged. Numbers rise, but a planner that lost its keys may begin
again below the last acknowledgement, as Dynamo's does when it is restarted. So a decision is also open when
it was written after the acknowledgement and is another one.

Source: Dynamo's ``VirtualConnectorClient``, as its SLA planner's documentation describes it; the keys are in
``dynaplan.contract.store_keys``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from dynaplan.contract.store_keys import DesiredCounts, fleet_key, planner_prefix
from dynaplan.store.locks import RenewedLease
from dynaplan.store.model import Deleted, KeyValue, Put, Snapshot, Transaction
from dynaplan.worker.distributed_runtime import Runtime

if TYPE_CHECKING:
    from dynaplan.contract.counts import FleetCounts

DECISION_ID = "decision_id"
SCALED_DECISION_ID = "scaled_decision_id"


class VirtualConnectorClient:
    """Reads the planner's decisions for a namespace, and acknowledges them.

    ``runtime`` is what ``dynaplan.runtime.connect`` gives; without ``namespace`` it is the deployment's.
    Methods raise StoreUnavailable when the store does not answer.
    """

    def __init__(self, runtime: Runtime, namespace: str = "") -> None:
        self._runtime = runtime
        self._namespace = namespace or self._runtime.own_namespace
        self._prefix = planner_prefix(self._namespace)
        self._lease: RenewedLease | None = None

    async def wait(self) -> None:
        """Return when there is a decision that nobody has acknowledged: at once when there is one already."""
        items: dict[str, KeyValue] = {}
        async with aclosing(self._runtime.store.watch(self._prefix)) as events:  # type: ignore[type-var]
            async for event in events:
                match event:
                    case Snapshot(found):
                        items = {item.key: item for item in found}
                    case Put(item):
                        items[item.key] = item
                    case Deleted(key):
                        items.pop(key, None)
                if self._is_open(items):
                    return

    async def get(self) -> DesiredCounts:
        """Return the newest decision; a number that is not set is -1."""
        items = await self._items()
        return DesiredCounts.from_keys(self._namespace, {key: item.value for key, item in items.items()})

    async def complete(self, decision: DesiredCounts) -> None:
        """Acknowledge that the decision is carried out; a newer one stays open, an older one changes nothing.

        Raises ValueError for a decision without a number.
        """
        if decision.decision_id < 0:
            raise ValueError("there is no decision to complete: its decision_id is not set")
        key = self._prefix + SCALED_DECISION_ID
        while True:
            items = await self._items()
            if not self._is_unacknowledged(items, decision.decision_id):
                return
            scaled = items.get(key)
            guard = {key: scaled.revision if scaled else 0}
            if await self._runtime.store.commit(Transaction(guard, {key: str(decision.decision_id)})):
                return

    async def publish_fleet(self, fleet: FleetCounts) -> None:
        """Tell the planner the numbers of workers by role and state, for as long as this program lives.

        Without it a planner counts the workers that are registered: it then knows of none that starts or
        drains, nor of the GPUs that each has.
        """
        lease = await self._kept_lease()
        document = json.dumps(fleet.to_json(), separators=(",", ":"))
        await self._runtime.store.put(fleet_key(self._namespace), document, lease.number)

    async def close(self) -> None:
        """Take back what ``publish_fleet`` has published."""
        if self._lease:
            await self._lease.end()
            self._lease = None

    async def _kept_lease(self) -> RenewedLease:
        if self._lease is None or not self._lease.is_alive:
            runtime = self._runtime
            self._lease = await RenewedLease.grant(runtime.store, runtime.clock, runtime.lease_ttl_s)
        return self._lease

    async def _items(self) -> dict[str, KeyValue]:
        return {item.key: item for item in await self._runtime.store.list(self._prefix)}

    def _is_open(self, items: Mapping[str, KeyValue]) -> bool:
        return self._is_unacknowledged(items, self._counts(items).decision_id)

    def _is_unacknowledged(self, items: Mapping[str, KeyValue], decision_id: int) -> bool:
        """Tell whether the number is above the acknowledged one, or that of a decision written after it."""
        counts = self._counts(items)
        if decision_id < 0 or decision_id == counts.scaled_decision_id:
            return False
        if decision_id > counts.scaled_decision_id:
            return True
        decided, scaled = (items.get(self._prefix + name) for name in (DECISION_ID, SCALED_DECISION_ID))
        is_newest = decided is not None and decision_id == counts.decision_id
        return bool(is_newest and decided and scaled and decided.revision > scaled.revision)

    def _counts(self, items: Mapping[str, KeyValue]) -> DesiredCounts:
        return DesiredCounts.from_keys(self._namespace, {key: item.value for key, item in items.items()})
