"""The connector of a model that is one of several, loaded on request: its decisions are wishes.

The fleet plugin loads and unloads models, and divides the memory of the box among them
(``dynaplan.models.rules.replicas``). So a decision here says how many workers its model wants while it is
loaded, and counts as carried out when none is starting any more, also when there are fewer than wanted:
more may come whenever there is memory. Where the keys are: ``dynaplan.contract.model_keys``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dynaplan.config.settings.models import prefill_pool_name
from dynaplan.contract.counts import FleetCounts, WorkerCounts
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.model_keys import (
    MODEL_WORKERS,
    PoolReport,
    planned_workers_in,
    planned_workers_text,
    reports_in,
)
from dynaplan.contract.store_keys import DesiredCounts, fleet_key, scaling_key
from dynaplan.planner.deployment import DeployedComponents, missing_workers
from dynaplan.planner.model import Decision
from dynaplan.planner.ports import NothingToPlan, Registrations
from dynaplan.store.model import KeyValue, Transaction
from dynaplan.store.port import KeyValueStore
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import TemporaryError

ATTEMPTS = 20
"""Times that a number is written when planners of other models write theirs at the same time."""


class ModelConnector:
    """Asks for the workers of one model; see ``dynaplan.planner.ports.Connector``."""

    def __init__(
        self, store: KeyValueStore, namespace: str, model: str, registrations: Registrations
    ) -> None:
        self._store = store
        self._fleet_key = fleet_key(namespace)
        self._key = scaling_key(namespace, MODEL_WORKERS)
        self._model = model
        self._registrations = registrations
        self._decision_id = 0

    async def fleet(self) -> FleetCounts:
        """Return the workers of the model.

        Raises NothingToPlan without a present decode worker, and deletes what was asked for. Workers that
        share a GPU count as if each had its own: the box is taken to have as many as they need.
        """
        item = await self._store.get(self._fleet_key)
        document = _document(item)
        report = reports_in(document).get(self._model)
        if report is None:
            raise NothingToPlan(f"nothing is known of the model {self._model} yet")
        decode, prefill = _counts(report), _counts(report.prefill) if report.prefill else WorkerCounts()
        if not decode.present:
            await self._write({})
            raise NothingToPlan(f"the model {self._model} is {report.state}: it has no workers to plan for")
        used = math.ceil(sum(each.gpus * each.holding for each in (prefill, decode)))
        on_box = max(used, FleetCounts.from_json(document).gpus_total) if used else 0
        return FleetCounts(prefill, decode, on_box)

    async def desired(self) -> DesiredCounts:
        """Return the numbers asked for; they are pending while one of the model's workers starts."""
        fleet = await self.fleet()
        wanted = _planned(await self._store.get(self._key))
        is_pending = any(each.starting + each.backoff for each in (fleet.prefill, fleet.decode))
        return DesiredCounts(
            num_prefill_workers=wanted.get(prefill_pool_name(self._model), -1),
            num_decode_workers=wanted.get(self._model, -1),
            decision_id=self._decision_id,
            scaled_decision_id=self._decision_id - is_pending,
        )

    async def holds(self) -> RoleHolds:
        return RoleHolds()

    async def apply(self, decision: Decision) -> int:
        """Write the wanted numbers; those of other models stay. A model without prefill workers gets none."""
        wanted = {self._model: decision.desired.decode}
        if decision.desired.prefill:
            wanted[prefill_pool_name(self._model)] = decision.desired.prefill
        await self._write(wanted)
        self._decision_id += 1
        return self._decision_id

    async def components(self) -> DeployedComponents:
        missing = missing_workers(await self.fleet(), await self.desired())
        return DeployedComponents(tuple(self._registrations.components()), missing)

    async def _write(self, wanted: Mapping[str, int]) -> None:
        """Set the numbers asked for this model, by pool; a pool that is left out is deleted."""
        pools = self._model, prefill_pool_name(self._model)
        for _ in range(ATTEMPTS):
            item = await self._store.get(self._key)
            before = _planned(item)
            after = {name: number for name, number in before.items() if name not in pools}
            after |= wanted
            if after == before:
                return
            expected = {self._key: item.revision if item else 0}
            if await self._store.commit(Transaction(expected, {self._key: planned_workers_text(after)})):
                return
        raise TemporaryError("other planners write their numbers of workers all the time")


def _counts(pool: PoolReport) -> WorkerCounts:
    counts = {**pool.workers, "gpus": pool.gpus_each, "startup_s": pool.load_s}
    return WorkerCounts.from_json(counts)


def _document(item: KeyValue | None) -> dict[str, Any]:
    try:
        return parse_object(item.value) if item else {}
    except ValueError as error:
        raise TemporaryError(f"what is published of the fleet cannot be read: {error}") from error


def _planned(item: KeyValue | None) -> dict[str, int]:
    """Read the numbers asked for, by pool; none where the text cannot be read."""
    try:
        return planned_workers_in(item.value if item else "")
    except ValueError:
        return {}
