"""The objects that hold keys: the shared ConfigMap, and each pod's ``DynamoWorkerMetadata``.

``spec.data`` of the latter is what Dynamo reads of a worker: the keys of its layout (``v1/instances``,
``v1/mdc``, ``v1/event_channels``) by section, as its ``KubeDiscoveryClient`` writes them (ai-dynamo/dynamo,
lib/runtime/src/discovery/kube). Our own leases and keys are in an annotation, which Dynamo does not read: its
reader may refuse an unknown field of the data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from dynaplan.store.kubernetes_client import CONFIG_MAPS, Object, Resource
from dynaplan.store.kubernetes_objects import GROUP, KIND, PLURAL, VERSION
from dynaplan.util.documents import object_field, parse_object, text_field, whole_field

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
class HeldLease:
    """A lease of a pod: its time to live in seconds, and the keys that are written under it."""

    ttl_s: int
    keys: Mapping[str, StoredKey] = field(default_factory=dict)


@dataclass(frozen=True)
class PodRecord:
    """The leases of a pod by their ids; ``process`` marks the process in it that they are of."""

    leases: Mapping[int, HeldLease] = field(default_factory=dict)
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
    """Return the shared ConfigMap with these keys, in the place of the one that was read."""
    text = json.dumps(_document(keys), indent=1, sort_keys=True)
    if before is None:
        metadata: Object = {"name": name, "labels": dict(LABELS)}
        return _made(CONFIG_MAPS, "ConfigMap", metadata, data={KEYS_FIELD: text})
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
    """Return the ``DynamoWorkerMetadata`` of that record, in the place of the one that was read.

    A new one is owned by ``pod``: it goes with it.
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
        else _made(WORKER_METADATA, KIND, metadata, spec=spec)
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


def _lease(leases: Mapping[str, Any], lease: str) -> HeldLease:
    entry = object_field(leases, lease)
    return HeldLease(whole_field(entry, "ttl_s"), _keys(object_field(entry, "keys", {}), int(lease, 16)))


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


def _made(resource: Resource, kind: str, metadata: Object, **more: Any) -> Object:
    return {"apiVersion": resource.api_version, "kind": kind, "metadata": metadata, **more}


def _name(document: Object) -> str:
    return str(document["metadata"].get("name"))
