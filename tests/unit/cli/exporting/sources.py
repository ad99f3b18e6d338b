"""Deployments to export, of the shipped graphs."""

from __future__ import annotations

from typing import Any

from dynaplan.cli.exporting.describing import Wishes, described
from dynaplan.cli.exporting.sources import ExportSource, of_graph
from dynaplan.core.manifests.exported import ExportedDeployment, ExportedService
from dynaplan.domain.lifecycle import Role


def disagg(*overrides: str, file: str = "disagg.yaml") -> ExportSource:
    return of_graph("graphs.disagg:Frontend", file, "box", list(overrides))


def exported(source: ExportSource, **wishes: Any) -> ExportedDeployment:
    return described(source, Wishes("example/dynaplan:1", **wishes))[0]


def cautions_about(source: ExportSource, **wishes: Any) -> str:
    return "\n".join(described(source, Wishes("example/dynaplan:1", **wishes))[1])


def part(deployment: ExportedDeployment, role: Role) -> ExportedService:
    found = deployment.of_role(role)
    assert found
    return found
