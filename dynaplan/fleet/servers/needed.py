"""The servers that a deployment needs: what is not needed is not started.

etcd runs when it is the key-value store, and NATS when it is, when prompts go through the prefill queue, when
frontends route by events or share their bookings by them, and when ``DYN_EVENT_PLANE`` asks for it.
A server that the environment names is used in the place of one of our own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaplan.config.frontend import SECTIONS, uses_events
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.servers import (
    BACKEND_VARIABLE,
    ETCD,
    FILE,
    FILE_VARIABLE,
    KUBERNETES,
    NATS,
    NATS_VARIABLE,
    PLACES,
    is_nats_wanted,
    lease_ttl_s,
    shared_backend,
)
from dynaplan.events.prefill_requests import prefill_stream
from dynaplan.fleet.runtime_dir import make_private_directory
from dynaplan.fleet.servers.data_room import has_room
from dynaplan.fleet.servers.embedded import ServerSpec, embedded_etcd, embedded_nats
from dynaplan.fleet.servers.external import check_external_nats, check_external_store
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec
from dynaplan.store import connections
from dynaplan.util.errors import ConfigError

STORE_DIRECTORY = "store"
"""The name of the key-value store's directory, when the store is ``file``."""

STORE_BYTES = 16 * 2**20
"""Room that the directory needs: its log is written anew when it has grown to a few megabytes."""


@dataclass(frozen=True)
class SharedServers:
    """The servers of a deployment.

    ``started`` are those to start; ``environment`` is what every process needs to find all of them.
    ``store_outlives``: the key-value store is the user's, and keeps what we leave in it.
    """

    started: tuple[ServerSpec, ...]
    environment: Mapping[str, str]
    store_outlives: bool


@dataclass(frozen=True)
class OwnPlaces:
    """The private directories of a deployment, all there: where its servers and its store keep things.

    ``address_dir`` is the path by which sockets in ``runtime_dir`` are addressed; ``scratch_dir`` is in
    memory where that is possible.
    """

    runtime_dir: Path
    address_dir: Path
    scratch_dir: Path


def shared_servers(
    graph: GraphSpec, config: Mapping[str, Mapping[str, Any]], places: OwnPlaces
) -> SharedServers:
    """Find the servers to start, and check the ones that the environment names; raises UserError."""
    backend = shared_backend(os.environ)
    if backend == KUBERNETES:
        raise ConfigError(
            "serve keeps no deployment in a cluster's API: there a registration ends with its pod",
            hint="Use file, which needs no server; on Kubernetes each component is a pod of its own: "
            "`dynaplan export kubernetes --store kubernetes`.",
        )
    is_wanted = is_nats_wanted(os.environ)
    lease_ttl_s(os.environ)
    store_outlives = bool(os.environ.get(PLACES[backend]))
    has_own_nats = not os.environ.get(NATS_VARIABLE)
    if store_outlives:
        asyncio.run(check_external_store(os.environ, graph.namespace))
    if not has_own_nats:
        stream = prefill_stream(graph.namespace) if has_prefill_queue(graph, config) else ""
        asyncio.run(check_external_nats(os.environ, stream))
    started, environment = [], {BACKEND_VARIABLE: backend}
    if backend == ETCD and not store_outlives:
        started.append(embedded_etcd(places.runtime_dir, places.address_dir))
    if backend == FILE and not store_outlives:
        environment[FILE_VARIABLE] = str(_store_directory(places))
    if has_own_nats:
        environment[NATS_VARIABLE] = ""
        if backend == NATS or is_wanted or needs_nats(graph, config):
            started.append(embedded_nats(places.runtime_dir))
    for server in started:
        environment |= server.environment
    return SharedServers(tuple(started), environment, store_outlives)


def needs_nats(graph: GraphSpec, config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether the graph and its configuration have a prefill queue, or events."""
    return has_prefill_queue(graph, config) or uses_events(config)


def has_prefill_queue(graph: GraphSpec, config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether prompts go through the prefill queue: there are workers for it, or Frontends use it."""
    is_remote = any(section_options(config, name).get("remote-prefill") for name in SECTIONS)
    return is_remote or graph.of_role(Role.PREFILL) is not None


def _store_directory(places: OwnPlaces) -> Path:
    """Make the directory of a store in files: beside the sockets, or in memory where that cannot do.

    The first is on the disk of the statefiles, which may be full, or on a network file system.
    """
    directory = places.runtime_dir / STORE_DIRECTORY
    if not has_room(places.runtime_dir, STORE_BYTES) and has_room(places.scratch_dir, STORE_BYTES):
        directory = places.scratch_dir / STORE_DIRECTORY
    try:
        _make_store(directory)
    except ConfigError:
        directory = places.scratch_dir / STORE_DIRECTORY
        _make_store(directory)
    return directory


def _make_store(directory: Path) -> None:
    """Make the directory; raises ConfigError where a store cannot be."""
    make_private_directory(directory)
    connections.connect_store({BACKEND_VARIABLE: FILE, FILE_VARIABLE: str(directory)})
