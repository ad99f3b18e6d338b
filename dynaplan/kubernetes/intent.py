"""The newest decision, in a ConfigMap: numbers by the names of the virtual connector's keys, and the holds.

It outlives the planner. A decision is written whole, in one write that fails when somebody else wrote
meanwhile, before anything is scaled; the changes that are still to be made are under ``unfinished``, so that
the next planner finishes what was begun.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from dynaplan.contract.holds import HOLDS
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts, planner_prefix
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.client import CONFIG_MAPS, KubernetesClient, Object
from dynaplan.kubernetes.names import intent_map_name
from dynaplan.util.documents import object_field, parse_object, whole_field
from dynaplan.util.errors import ClusterConflict, ClusterNotFound

UNFINISHED = "unfinished"
"""The field with the changes of the newest decision that are still to be made, JSON by role; "" when none."""

LABELS = {"app.kubernetes.io/managed-by": "dynaplan"}


@dataclass(frozen=True)
class Change:
    """A role's number of workers before a decision, and after it."""

    before: int
    after: int

    def includes(self, replicas: int) -> bool:
        """Tell whether a number is on the way: another one was asked for by somebody else."""
        return min(self.before, self.after) <= replicas <= max(self.before, self.after)


@dataclass(frozen=True)
class Intent:
    """The newest decision, its changes of workloads that are still to be made, and the holds as text.

    ``version`` is the ConfigMap's, "" without one: a write fails when it has another by then.
    """

    counts: DesiredCounts = field(default_factory=DesiredCounts)
    unfinished: Mapping[Role, Change] = field(default_factory=dict)
    holds: str = ""
    version: str = ""

    @property
    def is_open(self) -> bool:
        """True while the decision is not carried out."""
        return bool(self.unfinished) or self.counts.is_pending


class IntentMap:
    """The ConfigMap in which one deployment's planner writes its decisions; see ``intent_map_name``."""

    def __init__(self, client: KubernetesClient, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self.name = intent_map_name(namespace)

    async def read(self) -> Intent:
        """Return the newest decision; an empty one without a ConfigMap."""
        try:
            document = await self._client.get(CONFIG_MAPS, self.name)
        except ClusterNotFound:
            return Intent()
        data = document.get("data") or {}
        prefix = planner_prefix(self._namespace)
        counts = DesiredCounts.from_keys(
            self._namespace, {prefix + key: value for key, value in data.items()}
        )
        version = document["metadata"]["resourceVersion"]
        return Intent(counts, _changes(data.get(UNFINISHED, "")), data.get(HOLDS, ""), version)

    async def write(self, intent: Intent) -> Intent:
        """Write a decision over the version that it was made from; ClusterConflict when another is there."""
        counts = intent.counts
        numbers = {
            "num_prefill_workers": counts.num_prefill_workers,
            "num_decode_workers": counts.num_decode_workers,
            "decision_id": counts.decision_id,
            "scaled_decision_id": counts.scaled_decision_id,
        }
        data = {key: str(number) if number >= 0 else None for key, number in numbers.items()}
        data[UNFINISHED] = _text(intent.unfinished)
        if intent.holds:
            data[HOLDS] = intent.holds
        if intent.version:
            changes: Object = {"metadata": {"resourceVersion": intent.version}, "data": data}
            try:
                document = await self._client.patch(CONFIG_MAPS, self.name, changes)
            except ClusterNotFound as error:
                raise ClusterConflict(f"the ConfigMap {self.name} was deleted meanwhile") from error
        else:
            document = await self._client.create(
                CONFIG_MAPS,
                {
                    "apiVersion": "v1",
                    "kind": "ConfigMap",
                    "metadata": {"name": self.name, "labels": LABELS},
                    "data": {key: value for key, value in data.items() if value is not None},
                },
            )
        version = document["metadata"]["resourceVersion"]
        return Intent(intent.counts, intent.unfinished, intent.holds, version)


def _text(unfinished: Mapping[Role, Change]) -> str:
    changes = {role.value: {"from": each.before, "to": each.after} for role, each in unfinished.items()}
    return json.dumps(changes) if changes else ""


def _changes(text: str) -> dict[Role, Change]:
    """Read the changes that are to be made; none from an invalid text."""
    try:
        document = parse_object(text) if text else {}
        found = {role: object_field(document, role.value, {}) for role in SCALED_ROLES}
        return {
            role: Change(whole_field(each, "from"), whole_field(each, "to"))
            for role, each in found.items()
            if each
        }
    except ValueError:
        return {}
