"""The objects of a cluster that hold keys: as they are read and written, and the keys that they hold
together.

``DynamoWorkerMetadata``, one for each pod, has in ``spec.data`` what Dynamo reads of a worker: the keys of
its layout (``v1/instances``, ``v1/mdc``, ``v1/event_channels``) by section, as its ``KubeDiscoveryClient``
writes them (ai-dynamo/dynamo, lib/runtime/src/discovery/kube). Our own leases and keys are in an annotation,
which Dynamo does not read: its reader may refuse an unknown field of the data. All other keys are in one
ConfigMap. EndpointSlices say which pods are ready.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dynaplan.kubernetes.client import CONFIG_MAPS, KubernetesClient, Object, Resource
from dynaplan.kubernetes.names import GROUP, KIND, PLURAL, STORE_MAP, VERSION
from dynaplan.store.model import KeyValue
from dynaplan.util.documents import object_field, parse_object, text_field, whole_field
from dynaplan.util.errors import ClusterNotFound

log = logging.getLogger(__name__)

WORKER_METADATA = Resource(GROUP, VERSION, PLURAL)

SLICES = tuple(Resource("discovery.k8s.io", version, "endpointslices") for version in ("v1", "v1beta1"))
"""EndpointSlices, the newest version first: ``v1`` is there from Kubernetes 1.21, ``v1beta1`` until 1.24."""

LABELS = MappingProxyType({"app.kubernetes.io/managed-by": "dynaplan"})
SELECTOR = ",".join(f"{name}={value}" for name, value in LABELS.items())

LEASES_ANNOTATION, PROCESS_ANNOTATION = "dynaplan.io/leases", "dynaplan.io/process"

KEYS_FIELD = "keys.json"
"""The field of the shared ConfigMap with all its keys."""

SECTIONS = MappingProxyType(
    {"v1/instances/": "endpoints", "v1/mdc/": "model_cards", "v1/event_channels/": "event_channels"}
)
"""Buckets of Dynamo's layout -> the sections of ``spec.data`` that hold their keys, without the bucket."""


@dataclass(frozen=True)
class StoredKey:
    """The value of a key, the revision of its last change, and its lease (0: none)."""

    value: str
    revision: int
    lease: int = 0


@dataclass(frozen=True)
class PodLease:
    """A lease of a pod: its time to live in seconds, and the keys that are written under it."""

    ttl_s: int
    keys: Mapping[str, StoredKey] = field(default_factory=dict)


@dataclass(frozen=True)
class PodRecord:
    """The leases of a pod by their ids; ``process`` marks the process in it that they are of."""

    leases: Mapping[int, PodLease] = field(default_factory=dict)
    process: str = ""


@dataclass(frozen=True)
class PodIdentity:
    """The name and the UID of the pod that a process runs in."""

    name: str
    uid: str


def shared_keys(document: Object) -> dict[str, StoredKey]:
    """Return the keys in the shared ConfigMap; none where somebody has made it unreadable."""
    text = (document.get("data") or {}).get(KEYS_FIELD) or "{}"
    try:
        return _keys(parse_object(text))
    except ValueError as error:
        log.warning("the ConfigMap %s cannot be read: %s", _name(document), error)
        return {}


def shared_map(name: str, keys: Mapping[str, StoredKey], before: Object | None) -> Object:
    """Return the shared ConfigMap with exactly these keys: ``before`` as it was read, or a new one."""
    text = json.dumps(_document(keys), indent=1, sort_keys=True)
    if before is None:
        metadata: Object = {"name": name, "labels": dict(LABELS)}
        return _new_object(CONFIG_MAPS, "ConfigMap", metadata, data={KEYS_FIELD: text})
    return {**before, "data": {**(before.get("data") or {}), KEYS_FIELD: text}}


def pod_record(document: Object) -> PodRecord:
    """Return the leases in a ``DynamoWorkerMetadata``; none where it cannot be read."""
    annotations = document["metadata"].get("annotations") or {}
    try:
        leases = parse_object(annotations.get(LEASES_ANNOTATION) or "{}")
        held = {int(lease, 16): _lease(leases, lease) for lease in leases}
    except ValueError as error:
        log.warning("the %s %s cannot be read: %s", KIND, _name(document), error)
        return PodRecord()
    return PodRecord(held, annotations.get(PROCESS_ANNOTATION, ""))


def worker_metadata(name: str, record: PodRecord, before: Object | None, pod: PodIdentity | None) -> Object:
    """Return the ``DynamoWorkerMetadata`` of that record: ``before`` as it was read, or a new one, changed.

    With ``pod`` it is owned by that pod: the cluster deletes it with the pod.
    """
    leases = {
        f"{lease:x}": {"ttl_s": held.ttl_s, "keys": _document(held.keys)}
        for lease, held in record.leases.items()
    }
    annotations = {LEASES_ANNOTATION: json.dumps(leases), PROCESS_ANNOTATION: record.process}
    spec = {"data": dynamo_data(record)}
    old: Object = before["metadata"] if before else {"name": name}
    metadata: Object = {
        **old,
        "labels": {**(old.get("labels") or {}), **LABELS},
        "annotations": {**(old.get("annotations") or {}), **annotations},
        **({"ownerReferences": [_owner(pod)]} if pod else {}),
    }
    return (
        {**before, "metadata": metadata, "spec": spec}
        if before
        else _new_object(WORKER_METADATA, KIND, metadata, spec=spec)
    )


def dynamo_data(record: PodRecord) -> Object:
    """Return what Dynamo reads of a pod: its instances, model cards and event channels."""
    data: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS.values()}
    for held in record.leases.values():
        for key, stored in held.keys.items():
            for bucket, section in SECTIONS.items():
                if key.startswith(bucket):
                    with suppress(ValueError):  # Somebody's value that is none of Dynamo's layout.
                        data[section][key.removeprefix(bucket)] = parse_object(stored.value)
    return data


def ready_pods(document: Object) -> frozenset[str]:
    """Return the names of the pods that an EndpointSlice calls ready.

    A condition that is not there is unknown, and is to be taken for ready (API reference of EndpointSlice).
    """
    return frozenset(
        (endpoint.get("targetRef") or {}).get("name", "")
        for endpoint in document.get("endpoints") or ()
        if (endpoint.get("targetRef") or {}).get("kind") == "Pod"
        and (endpoint.get("conditions") or {}).get("ready") is not False
    )


def _keys(document: Mapping[str, Any], lease: int = 0) -> dict[str, StoredKey]:
    found = {}
    for key in document:
        entry = object_field(document, key)
        of = lease or int(text_field(entry, "lease", "0"), 16)
        found[key] = StoredKey(text_field(entry, "value"), whole_field(entry, "revision"), of)
    return found


def _lease(leases: Mapping[str, Any], lease: str) -> PodLease:
    entry = object_field(leases, lease)
    return PodLease(whole_field(entry, "ttl_s"), _keys(object_field(entry, "keys", {}), int(lease, 16)))


def _document(keys: Mapping[str, StoredKey]) -> Object:
    return {
        key: {
            "value": stored.value,
            "revision": stored.revision,
            **({"lease": f"{stored.lease:x}"} if stored.lease else {}),
        }
        for key, stored in keys.items()
    }


def _owner(pod: PodIdentity) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": pod.name,
        "uid": pod.uid,
        "controller": False,
        "blockOwnerDeletion": False,
    }


def _new_object(resource: Resource, kind: str, metadata: Object, **more: Any) -> Object:
    return {"apiVersion": resource.api_version, "kind": kind, "metadata": metadata, **more}


def _name(document: Object) -> str:
    return str(document["metadata"].get("name"))


@dataclass(frozen=True)
class ClusterState:
    """The objects as they were read: the shared keys, the pods' records by name, and the pods that are ready.

    A lease exists as long as a record has it, so it ends with its pod. Of a key in two places the one with
    the higher revision counts.
    """

    shared: Mapping[str, StoredKey] = field(default_factory=dict)
    pods: Mapping[str, PodRecord] = field(default_factory=dict)
    ready: frozenset[str] = frozenset()

    def find_holder(self, lease: int) -> tuple[str, int] | None:
        """Return the pod that has a lease, and its time to live in seconds; None when nobody has."""
        for name, record in self.pods.items():
            if lease in record.leases:
                return name, record.leases[lease].ttl_s
        return None

    def all_keys(self) -> dict[str, StoredKey]:
        """Return every key whose lease exists, whether its pod is ready or not."""
        return _newest(self._candidates(self.pods))

    def visible_to(self, pod: str) -> dict[str, KeyValue]:
        """Return what a process sees: what ready pods and its own have registered, and the shared keys."""
        seen = {name: record for name, record in self.pods.items() if name == pod or name in self.ready}
        return {
            key: KeyValue(key, stored.value, stored.revision, stored.lease)
            for key, stored in sorted(_newest(self._candidates(seen)).items())
        }

    def unready_pods(self) -> list[str]:
        """Return the pods that have registered something and are not ready."""
        return [
            name
            for name, record in self.pods.items()
            if name not in self.ready and any(held.keys for held in record.leases.values())
        ]

    def _candidates(self, pods: Mapping[str, PodRecord]) -> Iterator[tuple[str, StoredKey]]:
        alive = {lease for record in self.pods.values() for lease in record.leases}
        for key, stored in self.shared.items():
            if not stored.lease or stored.lease in alive:
                yield key, stored
        for record in pods.values():
            for held in record.leases.values():
                yield from held.keys.items()


def _newest(candidates: Iterator[tuple[str, StoredKey]]) -> dict[str, StoredKey]:
    found: dict[str, StoredKey] = {}
    for key, stored in candidates:
        if key not in found or stored.revision > found[key].revision:
            found[key] = stored
    return found


@dataclass
class ObjectKind:
    """One kind of objects: their parsed contents by name, and the newest version seen.

    Versions are compared as numbers; Kubernetes has them rise within a kind (KEP-5504 makes that a promise).
    """

    resources: Sequence[Resource]
    parse: Callable[[Object], Any]
    labels: str = ""
    fields: str = ""
    parsed: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    has_synced: bool = False

    async def list_newest(self, client: KubernetesClient) -> tuple[list[Object], int]:
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
        """Replace all objects by a list, unless a newer version has been seen."""
        if version > self.version or not self.has_synced:
            self.parsed = {each["metadata"]["name"]: self.parse(each) for each in items}
            self.version = version
            self.has_synced = True

    def apply(self, kind: str, found: Object) -> None:
        """Apply a change, unless a newer version has been seen."""
        version = int(found["metadata"]["resourceVersion"])
        if version <= self.version:
            return
        self.version = version
        if kind in ("ADDED", "MODIFIED"):
            self.parsed[found["metadata"]["name"]] = self.parse(found)
        elif kind == "DELETED":
            self.parsed.pop(found["metadata"]["name"], None)


class ClusterObjects:
    """The objects of a store, of all three kinds."""

    def __init__(self) -> None:
        self.shared = ObjectKind((CONFIG_MAPS,), shared_keys, fields=f"metadata.name={STORE_MAP}")
        self.records = ObjectKind((WORKER_METADATA,), pod_record, labels=SELECTOR)
        self.slices = ObjectKind(SLICES, ready_pods)
        self.kinds = (self.shared, self.records, self.slices)

    @property
    def state(self) -> ClusterState:
        """Return the state that they describe together."""
        ready = frozenset[str]().union(*self.slices.parsed.values())
        return ClusterState(self.shared.parsed.get(STORE_MAP, {}), dict(self.records.parsed), ready)

    async def refresh(self, client: KubernetesClient) -> None:
        """List all of them again, the shared keys first: a lease that one of them names is made before it."""
        self.shared.replace(*await self.shared.list_newest(client))
        others = (self.records, self.slices)
        for kind, found in zip(
            others, await asyncio.gather(*(kind.list_newest(client) for kind in others)), strict=True
        ):
            kind.replace(*found)
