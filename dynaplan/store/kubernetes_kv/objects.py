"""The three kinds of objects that the store reads: shared keys, pods' records, readiness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaplan.store.kubernetes_client import CONFIG_MAPS, KubernetesClient, Object, Resource
from dynaplan.store.kubernetes_kv.documents import (
    SELECTOR,
    SLICES,
    WORKER_METADATA,
    pod_record,
    ready_pods,
    shared_keys,
)
from dynaplan.store.kubernetes_kv.picture import ClusterPicture
from dynaplan.store.kubernetes_objects import KIND, STORE_MAP
from dynaplan.util.errors import ClusterNotFound


@dataclass
class ObjectKind:
    """One kind of objects as they were last told: what each says, by its name, and their newest version.

    Versions are compared as numbers; Kubernetes has them rise within a kind (KEP-5504 makes that a promise).
    """

    resources: Sequence[Resource]
    parse: Callable[[Object], Any]
    labels: str = ""
    fields: str = ""
    told: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    is_known: bool = False

    async def listed(self, client: KubernetesClient) -> tuple[list[Object], int]:
        """List the objects in the newest version of their kind that the server serves.

        Raises ClusterNotFound when it serves none.
        """
        for resource in tuple(self.resources):
            try:
                items, version = await client.list(resource, self.labels, fields=self.fields)
            except ClusterNotFound:
                continue
            self.resources = (resource,)
            return items, int(version)
        name = self.resources[0]
        raise ClusterNotFound(
            f"this cluster does not serve {name.plural}.{name.group}",
            hint=f"`dynaplan export crd | kubectl apply -f -` installs {KIND}, as Dynamo's operator does; "
            "EndpointSlices come with Kubernetes 1.17.",
        )

    def replace(self, items: Sequence[Object], version: int) -> None:
        """Take a list over, unless something newer has been told."""
        if version > self.version or not self.is_known:
            self.told = {each["metadata"]["name"]: self.parse(each) for each in items}
            self.version = version
            self.is_known = True

    def apply(self, kind: str, found: Object) -> None:
        """Take a change over, unless it is older than what has been told."""
        version = int(found["metadata"]["resourceVersion"])
        if version <= self.version:
            return
        self.version = version
        if kind in ("ADDED", "MODIFIED"):
            self.told[found["metadata"]["name"]] = self.parse(found)
        elif kind == "DELETED":
            self.told.pop(found["metadata"]["name"], None)


class ClusterObjects:
    """The objects of a store, of all three kinds."""

    def __init__(self) -> None:
        self.shared = ObjectKind((CONFIG_MAPS,), shared_keys, fields=f"metadata.name={STORE_MAP}")
        self.records = ObjectKind((WORKER_METADATA,), pod_record, labels=SELECTOR)
        self.slices = ObjectKind(SLICES, ready_pods)
        self.kinds = (self.shared, self.records, self.slices)

    @property
    def picture(self) -> ClusterPicture:
        """Return what they say together."""
        ready = frozenset[str]().union(*self.slices.told.values())
        return ClusterPicture(self.shared.told.get(STORE_MAP, {}), dict(self.records.told), ready)

    async def refresh(self, client: KubernetesClient) -> None:
        """List all of them anew, the shared keys first: a lease that one of them names is made before it."""
        self.shared.replace(*await self.shared.listed(client))
        others = (self.records, self.slices)
        for kind, found in zip(
            others, await asyncio.gather(*(kind.listed(client) for kind in others)), strict=True
        ):
            kind.replace(*found)
