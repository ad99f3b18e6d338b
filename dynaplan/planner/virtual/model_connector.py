"""The connector of a model that is one of several, loaded on request: its decisions are wishes.

The fleet plugin loads and unloads models, and divides the memory of the box among them
(``dynaplan.models.rules.replicas``). So a decision here says how many workers its model wants while it is
loaded, and counts as carried out when none is starting any more, also when there are fewer than wanted:
more may come whenever there is memory. Where the keys are: ``dynaplan.fleet.model_keys``.
"""

from __future__ import annotations

from typing import Any

from dynaplan.fleet.counts import FleetCounts, WorkerCounts
from dynaplan.fleet.holds import RoleHolds
from dynaplan.fleet.model_keys import MODEL_WORKERS, planned_workers_in, planned_workers_text, reports_in
from dynaplan.fleet.store_keys import DesiredCounts, fleet_key, scaling_key
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
    """Says how many workers one model wants; see ``dynaplan.planner.ports.Connector``."""

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
        """The workers of the model. Where it has none, the number that it wants is deleted."""
        item = await self._store.get(self._fleet_key)
        document = _document(item)
        report = reports_in(document).get(self._model)
        if report is None:
            raise NothingToPlan(f"nothing is known of the model {self._model} yet")
        counts = {**report.workers, "gpus": report.gpus_each, "startup_s": report.load_s}
        fleet = FleetCounts(decode=WorkerCounts.from_json(counts))
        if not fleet.decode.present:
            await self._write(None)
            raise NothingToPlan(f"the model {self._model} is {report.state}: it has no workers to plan for")
        on_box = FleetCounts.from_json(document).gpus_total if report.gpus_each else 0
        return FleetCounts(decode=fleet.decode, gpus_total=on_box)

    async def desired(self) -> DesiredCounts:
        """The workers that the model wants; nothing is pending once none of those it has starts any more."""
        decode = (await self.fleet()).decode
        wanted = _planned(await self._store.get(self._key)).get(self._model)
        is_pending = decode.starting + decode.backoff > 0
        return DesiredCounts(
            num_decode_workers=-1 if wanted is None else wanted,
            decision_id=self._decision_id,
            scaled_decision_id=self._decision_id - is_pending,
        )

    async def holds(self) -> RoleHolds:
        return RoleHolds()

    async def apply(self, decision: Decision) -> int:
        """Write the wanted number; those of other models stay."""
        await self._write(decision.desired.decode)
        self._decision_id += 1
        return self._decision_id

    async def components(self) -> DeployedComponents:
        missing = missing_workers(await self.fleet(), await self.desired())
        return DeployedComponents(tuple(self._registrations.components()), missing)

    async def _write(self, workers: int | None) -> None:
        """Set the number of workers that the model wants; None deletes it."""
        for _ in range(ATTEMPTS):
            item = await self._store.get(self._key)
            before = _planned(item)
            after = {name: number for name, number in before.items() if name != self._model}
            if workers is not None:
                after[self._model] = workers
            if after == before:
                return
            expected = {self._key: item.revision if item else 0}
            if await self._store.commit(Transaction(expected, {self._key: planned_workers_text(after)})):
                return
        raise TemporaryError("other planners write their numbers of workers all the time")


def _document(item: KeyValue | None) -> dict[str, Any]:
    try:
        return parse_object(item.value) if item else {}
    except ValueError as error:
        raise TemporaryError(f"what is published of the fleet cannot be read: {error}") from error


def _planned(item: KeyValue | None) -> dict[str, int]:
    """Read the numbers; a text that cannot be parsed is discarded."""
    try:
        return planned_workers_in(item.value if item else "")
    except ValueError:
        return {}
