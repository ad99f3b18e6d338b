"""The fuse box: the only module that names concrete adapters. Imports each one only when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.domain.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.adapters.clock import SystemClock
    from dynaplan.adapters.local.claims import Claims
    from dynaplan.adapters.local.statefile import NamespaceLock, StatefileStore
    from dynaplan.adapters.stores.etcd import EtcdStore
    from dynaplan.domain.gpus import Gpu
    from dynaplan.domain.identity import ProcessIdentity
    from dynaplan.domain.observation import FleetCounts
    from dynaplan.domain.planner_settings import PlannerSettings
    from dynaplan.ports import (
        Clock,
        Connector,
        Engine,
        KeyValueStore,
        Messenger,
        MetricsSource,
        Processes,
        Recorder,
    )

ENGINES = ("sim",)
"""The values of ``engine:``."""


def system_clock() -> SystemClock:
    """The machine's monotonic clock."""
    from dynaplan.adapters.clock import SystemClock

    return SystemClock()


def connect_store() -> EtcdStore:
    """The key-value store that ``ETCD_ENDPOINTS`` names; it also keeps leases."""
    from dynaplan.adapters.stores.etcd import EtcdStore

    return EtcdStore.from_environment(os.environ)


async def connect_messenger() -> Messenger:
    """The messaging server that ``NATS_SERVER`` names."""
    from dynaplan.adapters.queues.nats import NatsMessenger

    return await NatsMessenger.from_environment(os.environ)


def make_engine(
    name: str,
    options: Mapping[str, Any],
    *,
    worker_name: str,
    address: str,
    role: str,
) -> Engine:
    """The inference engine of that name, not started; ConfigError for an unknown one or a wrong option.

    ``address`` is the base URL of the worker's own HTTP server.
    """
    _require_engine(name)
    from dynaplan.adapters.engines.sim import SimEngine

    return SimEngine(options, worker_name=worker_name, address=address, role=role)


def check_engine(name: str, options: Mapping[str, Any]) -> None:
    """Raise the ConfigError that making this engine would; nothing is made."""
    _require_engine(name)
    from dynaplan.adapters.engines.profiles import timing_for
    from dynaplan.core.engine_settings import SimOptions

    known = SimOptions.from_options(options)
    _, profile_kv_tokens = timing_for(known)
    known.settings(profile_kv_tokens)


def _require_engine(name: str) -> None:
    if name not in ENGINES:
        raise ConfigError(
            f"engine is '{name}', which is unknown", hint=f"expected one of: {', '.join(ENGINES)}"
        )


def statefile_path(namespace: str) -> Path:
    """The statefile of a namespace of this user."""
    from dynaplan.adapters.local import statefile

    return statefile.statefile_path(os.environ, namespace)


def open_statefile(path: Path) -> StatefileStore:
    """The statefile at that path."""
    from dynaplan.adapters.local.statefile import StatefileStore

    return StatefileStore(path)


def namespace_lock(path: Path) -> NamespaceLock:
    """The right to run the namespace whose statefile has that path."""
    from dynaplan.adapters.local.statefile import NamespaceLock

    return NamespaceLock(path)


def gpu_inventory(number: int | None) -> tuple[tuple[Gpu, ...], bool]:
    """The GPUs that a deployment may use, and whether they are simulated."""
    from dynaplan.adapters.local.gpus import inventory

    return inventory(number, os.environ)


def gpu_claims(arbiter: ProcessIdentity, namespace: str) -> Claims:
    """What keeps this arbiter and the others of the machine off each other's GPUs."""
    from dynaplan.adapters.local.claims import Claims, node_dir

    return Claims(arbiter, namespace, node_dir(os.environ))


def processes() -> Processes:
    """The processes of this machine."""
    from dynaplan.adapters.local import processes

    return processes


def planner_connector(
    store: KeyValueStore, namespace: str, registered: Callable[[], FleetCounts], clock: Clock
) -> Connector:
    """What carries the planner's decisions; ``registered`` counts workers where no supervisor does."""
    from dynaplan.adapters.connectors.virtual import VirtualConnector

    return VirtualConnector(store, namespace, registered, clock)


def worker_metrics() -> MetricsSource:
    """The load of workers, read over HTTP."""
    from dynaplan.adapters.metrics.http import HttpMetrics

    return HttpMetrics()


def planner_recorders(log_dir: Path, settings: PlannerSettings) -> Sequence[Recorder]:
    """What writes the planner's decisions and curves into that directory."""
    from dynaplan.adapters.recorders.jsonl import JsonLinesRecorder
    from dynaplan.adapters.recorders.tensorboard import TensorBoardRecorder

    return JsonLinesRecorder(log_dir), TensorBoardRecorder(log_dir, settings)


def announce_log_dir(planner_dir: Path, log_dir: Path) -> None:
    """Leave word in ``planner_dir`` where the newest planner logs; raises OSError when it cannot."""
    from dynaplan.adapters.recorders.jsonl import point_to

    point_to(planner_dir, log_dir)


def recent_decisions(planner_dir: Path, last: int) -> list[dict[str, Any]]:
    """The last records of the planners that left word there, oldest first, for ``explain``."""
    from dynaplan.adapters.recorders.jsonl import recent_records

    return recent_records(planner_dir, last)
