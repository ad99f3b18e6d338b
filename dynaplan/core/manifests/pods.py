"""The pods of the services: their commands, environments, probes, GPUs, files, and the time to leave.

Every container runs the command of a component that is started by itself (docs/guides/one-by-one.md). Health
is asked for where the component tells it. A worker that answers ``/load_metrics`` lives: its ``/health`` says
503 while it starts and while it drains, and neither is a reason to kill it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re

from dynaplan.core.manifests.exported import (
    NATS_TOKEN,
    TOKEN,
    Document,
    ExportedDeployment,
    ExportedService,
)
from dynaplan.core.manifests.objects import account_of, labels
from dynaplan.domain.lifecycle import Role

PORTS = {Role.FRONTEND: 8000, Role.DECODE: 8001, Role.PREFILL: 8001, Role.PLANNER: 9085}
"""The port on which each service answers; the last is the one of Dynamo's planner."""

CONFIG_DIRECTORY, PLANNER_DIRECTORY = "/etc/dynaplan/graph", "/etc/dynaplan/planner"
CONFIG_FILE = "graph.yaml"
STATE_DIRECTORY = "/var/lib/dynaplan"

SETTLING_S = 30
"""Seconds beyond the drain for the engine to end, and for the process to close its connections."""

UNLISTED_S = 5
"""Seconds for which a frontend that is to go still takes requests: the nodes learn of it one by one."""

CHECKSUM = "dynaplan.io/checksum"
"""The annotation of pods that changes with their configuration: applying a change starts them anew."""


def pod_template(
    deployment: ExportedDeployment, service: ExportedService, *, has_shared_memory: bool = False
) -> Document:
    """Return the template of a service's pods.

    ``has_shared_memory``: Dynamo's operator, or another maker of the pods, brings ``/dev/shm`` along.
    """
    volumes, mounts = _volumes(deployment, service, has_shared_memory)
    part = account_of(deployment, service.role)
    account = {"serviceAccountName": deployment.object_name(part)} if part else {}
    return {
        "metadata": {
            "labels": labels(deployment, service.role.value),
            "annotations": {CHECKSUM: checksum(deployment)},
        },
        "spec": {
            **account,
            "automountServiceAccountToken": bool(part),
            "terminationGracePeriodSeconds": grace_s(service),
            # Else dynaplan were process 1: deaf to SIGTERM while it starts, and heir of what engines leave.
            "shareProcessNamespace": True,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [_container(deployment, service, mounts)],
            "volumes": volumes,
        },
    }


def grace_s(service: ExportedService) -> int:
    """Return the seconds between SIGTERM and SIGKILL: the drain's, and some to end the engine."""
    unlisted_s = UNLISTED_S if service.role is Role.FRONTEND else 0
    return math.ceil(service.drain_s) + SETTLING_S + unlisted_s


def checksum(deployment: ExportedDeployment) -> str:
    """Return a digest of all that the pods read when they start."""
    digest = hashlib.sha256(json.dumps([deployment.config, dict(deployment.secrets)]).encode())
    for path, content in sorted(deployment.planner_files.items()):
        digest.update(path.encode() + b"\0" + content)
    return digest.hexdigest()[:16]


def file_key(path: str) -> str:
    """Return the key of a file in a ConfigMap, which must hold no slash."""
    return re.sub(r"[^-._a-zA-Z0-9]", "_", path.replace("/", "__"))


def _container(deployment: ExportedDeployment, service: ExportedService, mounts: list[Document]) -> Document:
    limits = {"nvidia.com/gpu": str(service.gpus)} if service.gpus else {}
    resources = {
        **({"requests": dict(service.requests)} if service.requests else {}),
        **({"limits": limits} if limits else {}),
    }
    # kube-proxy and load balancers learn later than the pod itself that it is to go.
    leaving = {"preStop": {"exec": {"command": ["sleep", str(UNLISTED_S)]}}}
    return {
        "name": "main",
        "image": deployment.image,
        "command": ["dynaplan"],
        "args": list(service.arguments),
        "env": environment(deployment, service),
        "ports": [{"name": "http", "containerPort": PORTS[service.role], "protocol": "TCP"}],
        **_probes(service.role),
        **({"lifecycle": leaving} if service.role is Role.FRONTEND else {}),
        **({"resources": resources} if resources else {}),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": mounts,
    }


def environment(deployment: ExportedDeployment, service: ExportedService) -> list[Document]:
    """Return the environment of a service's container: the pod, the servers, the token, its own variables."""
    servers = deployment.servers
    plain = {
        "DYN_DISCOVERY_BACKEND": servers.store,
        "NATS_SERVER": servers.nats_url,
        **({"ETCD_ENDPOINTS": servers.etcd_url} if servers.etcd_url else {}),
        "DYN_LOCAL_STATE_DIR": f"{STATE_DIRECTORY}/state",
        "DYNAPLAN_NODE_DIR": f"{STATE_DIRECTORY}/gpus",
        **({"DYNAPLAN_LOG_DIR": f"{STATE_DIRECTORY}/logs"} if service.role is Role.PLANNER else {}),
        **service.variables,
    }
    secrets = {
        **({"DYNAPLAN_WORKER_TOKEN": TOKEN} if service.role is not Role.PLANNER else {}),
        **({"NATS_AUTH_TOKEN": NATS_TOKEN} if servers.is_own_nats else {}),
        **service.secrets,
    }
    name = deployment.object_name("secret")
    return [
        *(_of_pod(variable, field) for variable, field in _POD_FIELDS.items()),
        *_advertised(service.role),
        *({"name": variable, "value": value} for variable, value in plain.items()),
        *(
            {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}
            for variable, key in secrets.items()
        ),
    ]


_POD_FIELDS = {"POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace", "POD_UID": "metadata.uid"}


def _of_pod(variable: str, path: str) -> Document:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _advertised(role: Role) -> list[Document]:
    """Return the address by which other pods reach this one; a worker's port is fixed for its probes."""
    if role is Role.PLANNER:
        return []
    host = _of_pod("DYNAPLAN_ADVERTISE_HOST", "status.podIP")
    port = {"name": "DYNAPLAN_ADVERTISE_PORT", "value": str(PORTS[role])}
    return [host] if role is Role.FRONTEND else [host, port]


def _probes(role: Role) -> Document:
    """Return the probes: a start may wait for the servers, a busy process answers within seconds."""
    lives = {Role.FRONTEND: "/live", Role.PLANNER: "/health"}.get(role, "/load_metrics")
    return {
        "startupProbe": {**_get(lives), "periodSeconds": 5, "failureThreshold": 120},
        "livenessProbe": {**_get(lives), "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "readinessProbe": {**_get("/health"), "periodSeconds": 5, "timeoutSeconds": 5, "failureThreshold": 2},
    }


def _get(path: str) -> Document:
    return {"httpGet": {"path": path, "port": "http"}}


def _volumes(
    deployment: ExportedDeployment, service: ExportedService, has_shared_memory: bool
) -> tuple[list[Document], list[Document]]:
    """Return the volumes of a pod, and where its container has them."""
    volumes: list[Document] = [{"name": "state", "emptyDir": {}}]
    mounts: list[Document] = [{"name": "state", "mountPath": STATE_DIRECTORY}]

    def add(name: str, path: str, source: Document, is_read: bool = True) -> None:
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path, **({"readOnly": True} if is_read else {})})

    if service.role is Role.PLANNER:
        if deployment.planner_files:
            items = [{"key": file_key(path), "path": path} for path in deployment.planner_files]
            source = {"configMap": {"name": deployment.object_name("planner"), "items": items}}
            add("planner", PLANNER_DIRECTORY, source)
        return volumes, mounts
    add("graph", CONFIG_DIRECTORY, {"configMap": {"name": deployment.object_name("graph")}})
    for number, volume in enumerate(deployment.volumes):
        add(f"volume-{number}", volume.path, {"persistentVolumeClaim": {"claimName": volume.claim}}, False)
    if service.has_engine and not has_shared_memory:
        add("shared-memory", "/dev/shm", {"emptyDir": {"medium": "Memory"}}, False)
    return volumes, mounts
