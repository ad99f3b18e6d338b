"""Deployments to make manifests of."""

from __future__ import annotations

from typing import Any

from dynaplan.core.manifests.exported import (
    NATS_TOKEN,
    TOKEN,
    ExportedDeployment,
    ExportedService,
    SharedServices,
)
from dynaplan.core.manifests.exported import Document as Manifest
from dynaplan.domain.lifecycle import Role

FRONTEND = ExportedService(
    Role.FRONTEND, ("frontend",), drain_s=20, secrets={"HF_TOKEN": "frontend.HF_TOKEN"}
)
DECODE = ExportedService(
    Role.DECODE,
    ("worker", "--role=decode"),
    replicas=2,
    gpus=2,
    requests={"cpu": "8", "memory": "64Gi"},
    drain_s=599.2,
    has_engine=True,
)
PREFILL = ExportedService(Role.PREFILL, ("worker", "--role=prefill"), gpus=1, drain_s=600)
PLANNER = ExportedService(Role.PLANNER, ("planner",), variables={"TZ": "UTC"})
OWN_NATS = SharedServices("nats", "nats://box-nats:4222", is_own_nats=True)


def deployment(**changes: Any) -> ExportedDeployment:
    given: dict[str, Any] = {
        "graph_namespace": "box",
        "name": "box",
        "image": "example/dynaplan:1",
        "services": (FRONTEND, DECODE, PREFILL, PLANNER),
        "config": "Common:\n  model: tiny\n",
        "servers": OWN_NATS,
        "secrets": {TOKEN: "t", NATS_TOKEN: "n", "frontend.HF_TOKEN": "hf"},
        "planner_files": {"profile/a/raw_data.npz": b"PK\x00\xff"},
    }
    return ExportedDeployment(**{**given, **changes})


def found(documents: list[Manifest], kind: str, name: str) -> Manifest:
    (one,) = (each for each in documents if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return one


def of_kind(documents: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in documents if each["kind"] == kind]
