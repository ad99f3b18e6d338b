"""The description of a deployment that is to run on Kubernetes: its services, its files, its secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.domain.lifecycle import Role

Document = dict[str, Any]
"""One manifest, or a part of one, as plain data."""

TOKEN, NATS_TOKEN = "token", "nats-token"
"""Keys of the Secret: the workers' token, and that of the NATS server of our own."""


@dataclass(frozen=True)
class ExportedService:
    """The pods of one service.

    ``arguments`` are those of ``dynaplan``, ``replicas`` the number of pods at first, each with ``gpus``
    whole GPUs and with ``requests`` of ``cpu`` and ``memory`` in Kubernetes' quantities. ``drain_s`` is how
    long a pod may take to finish its requests. ``variables`` go into its environment; so do ``secrets``,
    variable -> key of the Secret. ``has_engine``: the memory that processes share is large.
    """

    role: Role
    arguments: tuple[str, ...]
    replicas: int = 1
    gpus: int = 0
    requests: Mapping[str, str] = field(default_factory=dict)
    drain_s: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)
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
    objects; ``namespace`` is Kubernetes', empty for the one that the
    manifests are applied in. ``config`` is the graph's YAML. ``secrets`` are the Secret's values by their
    keys, ``planner_files`` what the planner reads, by paths below its directory. ``framework`` is the word of
    Dynamo's operator for the engine, empty for one that it does not know.
    """

    graph_namespace: str
    name: str
    image: str
    services: tuple[ExportedService, ...]
    config: str
    servers: SharedServices
    secrets: Mapping[str, str] = field(default_factory=dict)
    planner_files: Mapping[str, bytes] = field(default_factory=dict)
    volumes: tuple[VolumeMount, ...] = ()
    namespace: str = ""
    framework: str = ""

    def of_role(self, role: Role) -> ExportedService | None:
        """Return the service with that role, or None."""
        return next((each for each in self.services if each.role is role), None)

    def object_name(self, part: str) -> str:
        """Return the name of the object for a part of the deployment, such as ``frontend``."""
        return f"{self.name}-{part}"
