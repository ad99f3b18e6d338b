"""The Kubernetes manifests of a deployment: what they are made of, and the values that fill the templates.

Each service is a Deployment of its own, whose pods run one command of ``dynaplan``
(docs/guides/one-by-one.md). With Dynamo's operator it is a component of one DynamoGraphDeployment, with the
same pods.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaplan.config.settings.servers import KUBERNETES
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.names import STORE_MAP, intent_map_name
from dynaplan.kubernetes.templates import Document, documents

NONE, DYNAMO = "none", "dynamo"
OPERATORS = (NONE, DYNAMO)
"""Makers of the pods: Kubernetes' own controllers, or Dynamo's operator of a DynamoGraphDeployment."""

MAX_CONFIG_MAP_BYTES = 1 << 20
"""The most that a ConfigMap may hold, all keys and values together; the API server refuses more."""

LABEL_VALUE = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")
"""The form of a label's value (Kubernetes, "Labels and Selectors")."""

ENGINE_STOP_S = 30
"""Seconds beyond the drain for the engine to end, and for the process to close its connections."""

UNLISTED_S = 5
"""Seconds of a frontend's preStop hook: it takes requests until every node has learnt that it is deleted."""

TOKEN, NATS_TOKEN = "token", "nats-token"
"""Keys of the Secret: the workers' token, and that of the NATS server of our own."""


@dataclass(frozen=True)
class ExportedService:
    """The pods of one service.

    ``arguments`` are added to those in the template; ``replicas`` is the number of pods at first, each with
    ``gpus`` whole GPUs and with ``requests`` of ``cpu`` and ``memory`` in Kubernetes' quantities. ``drain_s``
    is how long a pod may take to finish its requests. ``secrets`` go into its environment: variable -> key of
    the Secret. ``has_engine``: the memory that processes share is large.
    """

    role: Role
    arguments: tuple[str, ...] = ()
    replicas: int = 1
    gpus: int = 0
    requests: Mapping[str, str] = field(default_factory=dict)
    drain_s: float = 0.0
    secrets: Mapping[str, str] = field(default_factory=dict)
    has_engine: bool = False


@dataclass(frozen=True)
class SharedServices:
    """The servers of a deployment in a cluster; empty addresses are those of servers that it does not need.

    ``store`` is the word for the key-value store. ``is_own_nats``: the NATS server is part of the manifests.
    """

    store: str
    nats_url: str = ""
    etcd_url: str = ""
    is_own_nats: bool = False


@dataclass(frozen=True)
class VolumeMount:
    """An existing PersistentVolumeClaim, and the path at which frontends and workers read it."""

    claim: str
    path: str


@dataclass(frozen=True)
class ExportedDeployment:
    """One deployment as its manifests describe it.

    ``graph_namespace`` is the namespace that dynaplan's components share. ``name`` begins the names of all
    objects; ``namespace`` is Kubernetes', empty for the one that the manifests are applied in. ``config`` is
    the graph's YAML. ``secrets`` are the Secret's values by their keys, ``planner_files`` what the planner
    reads, by paths below its directory. ``framework`` is the word of Dynamo's operator for the engine, empty
    for one that it does not know.
    """

    graph_namespace: str
    name: str
    image: str
    services: tuple[ExportedService, ...]
    config: str
    servers: SharedServices
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    planner_files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    volumes: tuple[VolumeMount, ...] = ()
    namespace: str = ""
    framework: str = ""

    def of_role(self, role: Role) -> ExportedService | None:
        return next((service for service in self.services if service.role is role), None)


def manifests(deployment: ExportedDeployment, operator: str = NONE) -> list[Document]:
    """Return the manifests of a deployment for that operator, in the order in which they are applied."""
    values = _shared_values(deployment, operator)
    found = [*documents("accounts.yaml", values), *documents("shared.yaml", values)]
    if deployment.servers.is_own_nats:
        found += documents("nats.yaml", values)
    workloads = []
    for service in deployment.services:
        template = "worker.yaml" if service.role in SCALED_ROLES else f"{service.role.value}.yaml"
        *services, workload = documents(template, values | _service_values(deployment, service, operator))
        found += services
        workloads.append(workload)
    if operator == DYNAMO:
        components = list(map(_component, deployment.services, workloads))
        return found + documents("graph_deployment.yaml", values | {"components": components})
    return found + workloads


def _component(service: ExportedService, workload: Document) -> Document:
    """Return the component of a DynamoGraphDeployment in the place of a Deployment."""
    return {
        "name": service.role.value,
        "type": service.role.value,
        "replicas": service.replicas,
        **({"scalingAdapter": {}} if service.role in SCALED_ROLES else {}),
        "podTemplate": workload["spec"]["template"],
    }


def _shared_values(deployment: ExportedDeployment, operator: str) -> dict[str, Any]:
    """Return the values that all templates share; None leaves a field out."""
    name, servers = deployment.name, deployment.servers
    roles = [role.value for role in SCALED_ROLES if deployment.of_role(role)]
    has_api_store = servers.store == KUBERNETES
    volumes = {f"volume-{number}": volume for number, volume in enumerate(deployment.volumes)}
    files = deployment.planner_files
    return {
        "name": name,
        "namespace": deployment.namespace or None,
        "graph_namespace": deployment.graph_namespace,
        "image": deployment.image,
        "checksum": checksum(deployment),
        "config": deployment.config,
        "secrets": dict(deployment.secrets),
        "is_plain": operator != DYNAMO,
        "is_dynamo": operator == DYNAMO,
        "framework": deployment.framework or None,
        "has_planner": deployment.of_role(Role.PLANNER) is not None,
        "scaled_names": [f"{name}-{role}" for role in roles],
        "closed_components": [role.value for role in SCALED_ROLES] + ["nats"] * servers.is_own_nats,
        "intent_map": intent_map_name(deployment.graph_namespace),
        "store_map": STORE_MAP,
        "store": servers.store,
        "nats_url": servers.nats_url,
        "etcd_url": servers.etcd_url,
        "has_own_nats": servers.is_own_nats,
        "has_api_store": has_api_store,
        "discovery_account": f"{name}-discovery" if has_api_store else None,
        # By these labels, copied to EndpointSlices, Dynamo finds the pods that are ready.
        "discovery_backend": "kubernetes" if has_api_store else None,
        "discovery_enabled": "true" if has_api_store else None,
        "claim_volumes": [
            {"name": key, "persistentVolumeClaim": {"claimName": volume.claim}}
            for key, volume in volumes.items()
        ],
        "claim_mounts": [{"name": key, "mountPath": volume.path} for key, volume in volumes.items()],
        "planner_data": {file_key(path): base64.b64encode(files[path]).decode() for path in files},
        "planner_items": [{"key": file_key(path), "path": path} for path in files],
    }


def _service_values(
    deployment: ExportedDeployment, service: ExportedService, operator: str
) -> dict[str, Any]:
    """Return the values of one service's template."""
    secret, namespace = f"{deployment.name}-secret", deployment.graph_namespace
    return {
        "role": service.role.value,
        "namespace_label": namespace if LABEL_VALUE.fullmatch(namespace) else None,
        "replicas": service.replicas,
        "grace_s": grace_s(service),
        "arguments": list(service.arguments),
        "secret_variables": [
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for variable, key in service.secrets.items()
        ],
        "requests": dict(service.requests) or None,
        "gpus": str(service.gpus) if service.gpus else None,
        "needs_shared_memory": service.has_engine and operator != DYNAMO,
    }


def grace_s(service: ExportedService) -> int:
    """Return the seconds between SIGTERM and SIGKILL: the drain's, and some to end the engine."""
    return math.ceil(service.drain_s) + ENGINE_STOP_S + UNLISTED_S * (service.role is Role.FRONTEND)


def checksum(deployment: ExportedDeployment) -> str:
    """Return a digest of all that the pods read when they start."""
    digest = hashlib.sha256(json.dumps([deployment.config, dict(deployment.secrets)]).encode())
    for path, content in sorted(deployment.planner_files.items()):
        digest.update(path.encode() + b"\0" + content)
    return digest.hexdigest()[:16]


def file_key(path: str) -> str:
    """Return the key of a file in a ConfigMap, which must hold no slash."""
    return re.sub(r"[^-._a-zA-Z0-9]", "_", path.replace("/", "__"))


def too_large(found: Sequence[Document]) -> list[str]:
    """Return the names of the ConfigMaps that no API server takes."""
    sizes = {
        document["metadata"]["name"]: sum(
            len(key) + len(value.encode())
            for key, value in {**document.get("data", {}), **document.get("binaryData", {})}.items()
        )
        for document in found
        if document["kind"] == "ConfigMap"
    }
    return [name for name, size in sizes.items() if size > MAX_CONFIG_MAP_BYTES]
