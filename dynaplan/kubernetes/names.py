"""Names in a Kubernetes cluster by which exported manifests, the planner's connector and the store agree."""

from __future__ import annotations

import re

ROLE_LABEL = "dynaplan.io/role"
"""The label by which the planner finds what it scales: ``prefill`` or ``decode``."""

NAMESPACE_LABEL = "dynaplan.io/namespace"
"""The label that says of which deployment an object is, where a Kubernetes namespace has several."""

STORE_MAP = "dynaplan-store"
"""The name of the ConfigMap with the shared keys of the key-value store ``kubernetes``."""

GROUP, VERSION, PLURAL, KIND = "nvidia.com", "v1alpha1", "dynamoworkermetadatas", "DynamoWorkerMetadata"
"""NVIDIA Dynamo's kind of object by which workers register; ``dynaplan export crd`` defines it."""


def intent_map_name(graph_namespace: str) -> str:
    """Return the name of the ConfigMap in which a planner writes its newest decision down."""
    name = re.sub(r"[^a-z0-9.-]+", "-", graph_namespace.lower()).strip("-.")
    return f"dynaplan-{name or 'planner'}"
