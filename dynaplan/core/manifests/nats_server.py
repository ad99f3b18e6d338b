"""The NATS server of a deployment in a cluster, where no other one is named: its store, queue and events.

It runs from the deployment's own image, as dynaplan depends on the server. Its data go with its pod:
components register again, the numbers of workers are the cluster's, and a prompt that was queued is computed
by its decode worker.
"""

from __future__ import annotations

from dynaplan.core.manifests.exported import NATS_TOKEN, Document, ExportedDeployment
from dynaplan.core.manifests.objects import config_map, labels, service, workload
from dynaplan.core.manifests.pods import CHECKSUM, checksum

COMPONENT = "nats"
PORT, MONITORING_PORT = 4222, 8222

CONFIG = f"""\
port: {PORT}
http: {MONITORING_PORT}
authorization {{ token: $NATS_AUTH_TOKEN }}
max_payload: 8388608
jetstream {{ store_dir: "/data", max_file_store: 1GB, max_memory_store: 64MB }}
"""
"""The server's configuration, the sizes those of the server that ``serve`` starts."""


def nats_documents(deployment: ExportedDeployment) -> list[Document]:
    """Return the NATS server's manifests."""
    return [
        config_map(deployment, COMPONENT, {"nats.conf": CONFIG}),
        service(deployment, COMPONENT, "nats", PORT),
        workload(deployment, COMPONENT, 1, _template(deployment), {"type": "Recreate"}),
    ]


def _template(deployment: ExportedDeployment) -> Document:
    secret = {"name": deployment.object_name("secret"), "key": NATS_TOKEN}
    probe = {"httpGet": {"path": "/healthz", "port": "monitoring"}, "timeoutSeconds": 5}
    return {
        "metadata": {
            "labels": labels(deployment, COMPONENT),
            "annotations": {CHECKSUM: checksum(deployment)},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": deployment.image,
                    "command": ["nats-server"],
                    "args": ["--config", "/etc/nats/nats.conf"],
                    "env": [{"name": "NATS_AUTH_TOKEN", "valueFrom": {"secretKeyRef": secret}}],
                    "ports": [
                        {"name": "nats", "containerPort": PORT, "protocol": "TCP"},
                        {"name": "monitoring", "containerPort": MONITORING_PORT, "protocol": "TCP"},
                    ],
                    "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
                    "readinessProbe": {**probe, "periodSeconds": 5},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [
                        {"name": "config", "mountPath": "/etc/nats", "readOnly": True},
                        {"name": "data", "mountPath": "/data"},
                    ],
                }
            ],
            "volumes": [
                {"name": "config", "configMap": {"name": deployment.object_name(COMPONENT)}},
                {"name": "data", "emptyDir": {"sizeLimit": "2Gi"}},
            ],
        },
    }
