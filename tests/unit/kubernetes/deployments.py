"""Deployments to export: of the shipped graphs, and made by hand."""

from __future__ import annotations

from typing import Any

from dynaplan.graph.lifecycle import Role
from dynaplan.kubernetes.description import ClusterOptions, cautions, describe
from dynaplan.kubernetes.manifests import (
    NATS_TOKEN,
    NONE,
    TOKEN,
    ExportedDeployment,
    ExportedService,
    SharedServices,
    manifests,
)
from dynaplan.kubernetes.sources import ExportSource, graph_source
from dynaplan.kubernetes.templates import Document as Manifest


def disagg(*overrides: str, file: str = "disagg.yaml") -> ExportSource:
    return graph_source("graphs.disagg:Frontend", file, "box", list(overrides))


def exported(source: ExportSource, **options: Any) -> ExportedDeployment:
    return describe(source, ClusterOptions("example/dynaplan:1", **options))


def cautions_about(source: ExportSource, **options: Any) -> str:
    return "\n".join(cautions(source, exported(source, **options)))


def part(deployment: ExportedDeployment, role: Role) -> ExportedService:
    found = deployment.of_role(role)
    assert found
    return found


FRONTEND = ExportedService(Role.FRONTEND, drain_s=20, secrets={"HF_TOKEN": "frontend.HF_TOKEN"})
DECODE = ExportedService(
    Role.DECODE,
    ("--model=tiny",),
    replicas=2,
    gpus=2,
    requests={"cpu": "8", "memory": "64Gi"},
    drain_s=599.2,
    has_engine=True,
)
PREFILL = ExportedService(Role.PREFILL, ("--model=tiny",), gpus=1, drain_s=600)
PLANNER = ExportedService(Role.PLANNER, ("--environment=kubernetes",))
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


def pod(given: ExportedDeployment, role: Role, operator: str = NONE) -> Manifest:
    """The template of a role's pods."""
    documents = manifests(given, operator)
    if operator == NONE:
        return found(documents, "Deployment", f"{given.name}-{role.value}")["spec"]["template"]
    components = found(documents, "DynamoGraphDeployment", given.name)["spec"]["components"]
    (template,) = (each["podTemplate"] for each in components if each["name"] == role.value)
    return template


def of_kind(documents: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in documents if each["kind"] == kind]
