"""The rights in the cluster, as few as each needs, and which pods may call which."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.core.manifests.exported import Document, ExportedDeployment
from dynaplan.core.manifests.nats_server import COMPONENT as NATS_COMPONENT
from dynaplan.core.manifests.objects import (
    COMPONENT_LABEL,
    INSTANCE_LABEL,
    SCALED,
    STORE_MAP,
    intent_map_name,
    metadata,
)

NVIDIA = "nvidia.com"


def account_with_rights(
    deployment: ExportedDeployment, part: str, rules: Sequence[Document]
) -> list[Document]:
    """Return a ServiceAccount, its Role with these rules, and the RoleBinding between them."""
    name = deployment.object_name(part)
    group = "rbac.authorization.k8s.io"
    place = {"namespace": deployment.namespace} if deployment.namespace else {}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata(deployment, name)},
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": metadata(deployment, name),
            "rules": list(rules),
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(deployment, name),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": name, **place}],
        },
    ]


def inside_only(deployment: ExportedDeployment) -> Document:
    """Return the NetworkPolicy of workers and NATS: pods of this deployment call them, and nobody else.

    The workers' own port stays open, for Prometheus and for the node's probes: it asks for the token.
    """
    closed = [*(role.value for role in SCALED), *_nats(deployment)]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(deployment, deployment.object_name("inside")),
        "spec": {
            "podSelector": {
                "matchLabels": {INSTANCE_LABEL: deployment.name},
                "matchExpressions": [{"key": COMPONENT_LABEL, "operator": "In", "values": closed}],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {INSTANCE_LABEL: deployment.name}}}]},
                {"ports": [{"port": "http", "protocol": "TCP"}]},
            ],
        },
    }


def _nats(deployment: ExportedDeployment) -> list[str]:
    return [NATS_COMPONENT] if deployment.servers.is_own_nats else []


def discovery_rules() -> list[Document]:
    """Return the rights to register, and to see which pods are registered and ready.

    ``create`` and ``update`` cannot be bound to the one object of the own pod: its name is not known before.
    The keys that people write, in the ConfigMap, are only read.
    """
    watching = ["list", "watch"]
    return [
        {
            "apiGroups": [NVIDIA],
            "resources": ["dynamoworkermetadatas"],
            "verbs": ["create", "get", "update", *watching],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": watching},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [STORE_MAP],
            "verbs": ["get", *watching],
        },
    ]


def scaling_rules(deployment: ExportedDeployment) -> list[Document]:
    """Return the rights to find the roles' workloads, and to scale the Deployments of this graph."""
    return [
        {"apiGroups": ["apps"], "resources": ["deployments", "statefulsets"], "verbs": ["list"]},
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": _scaled(deployment),
            "verbs": ["get", "patch"],
        },
        *_rules_of_both(deployment),
    ]


def operator_rules(deployment: ExportedDeployment) -> list[Document]:
    """Return the rights to scale a DynamoGraphDeployment: by its adapters, or by itself where it has none."""
    return [
        {
            "apiGroups": [NVIDIA],
            "resources": ["dynamographdeployments"],
            "resourceNames": [deployment.name],
            "verbs": ["get", "patch"],
        },
        {
            "apiGroups": [NVIDIA],
            "resources": ["dynamographdeploymentscalingadapters/scale"],
            "resourceNames": _scaled(deployment),
            "verbs": ["get", "patch"],
        },
        *_rules_of_both(deployment),
    ]


def _rules_of_both(deployment: ExportedDeployment) -> list[Document]:
    """Return the rights to say which pod goes first, and to write a decision down before it is carried out.

    What is to be made has no name yet, so that ``create`` cannot be bound to one.
    """
    intent = intent_map_name(deployment.graph_namespace)
    return [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]},
        {
            "apiGroups": [""],
            "resources": ["configmaps"],
            "resourceNames": [intent],
            "verbs": ["get", "patch"],
        },
    ]


def _scaled(deployment: ExportedDeployment) -> list[str]:
    """Return the names of what is scaled; an adapter's is that of the graph and its component."""
    return [deployment.object_name(role.value) for role in SCALED if deployment.of_role(role)]
