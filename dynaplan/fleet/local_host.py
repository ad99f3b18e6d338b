"""The box: its GPUs, ports and processes, and the files that describe a deployment there."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaplan.fleet.gpus import Gpu, GpuActivity, GpuUse
    from dynaplan.fleet.heartbeat import Heartbeats
    from dynaplan.fleet.ports import Claims, DocumentStore, StartupTimes
    from dynaplan.fleet.statefile_store import NamespaceLock
    from dynaplan.process.identity import LeaseOwner, ProcessIdentity
    from dynaplan.process.ports import ProcessWatch


def statefile_path(namespace: str) -> Path:
    """Return the path of a namespace's statefile, for this user."""
    from dynaplan.fleet import statefile_store as statefile

    return statefile.statefile_path(os.environ, namespace)


def open_statefile(path: Path) -> DocumentStore:
    """Return the statefile at that path."""
    from dynaplan.fleet.statefile_store import StatefileStore

    return StatefileStore(path)


def heartbeats(runtime_dir: Path) -> Heartbeats:
    """Return the heartbeats of the deployment with that directory."""
    from dynaplan.fleet.host.heartbeats import HeartbeatFiles

    return HeartbeatFiles(runtime_dir / "heartbeats")


def startup_times(statefile: Path) -> StartupTimes:
    """Return the start-up times that deployments with statefiles beside this one have learnt."""
    from dynaplan.fleet.host.startup_times import StartupTimesFile

    return StartupTimesFile(statefile.parent)


def namespace_lock(path: Path, owner_pid: int = 0) -> NamespaceLock:
    """Return the right to run the namespace of that statefile: held inside a ``with`` block."""
    from dynaplan.fleet.statefile_store import NamespaceLock

    return NamespaceLock(path, owner_pid)


def gpu_inventory(number: int | None) -> tuple[tuple[Gpu, ...], bool]:
    """Return the GPUs that a deployment may use, and whether they are simulated."""
    from dynaplan.fleet.host.gpu_uses import busy_now
    from dynaplan.fleet.host.gpus import inventory

    return inventory(number, os.environ, busy=busy_now)


def gpu_driver() -> tuple[str, str]:
    """Return the version of the NVIDIA driver, and why there is none; one of them is empty."""
    from dynaplan.fleet.host import gpus

    return gpus.driver()


def gpu_uses(gpus: Sequence[Gpu]) -> Callable[[], Mapping[int, GpuUse]]:
    """Return the reader of these GPUs' memory in use, real or simulated; it may block, and never raises."""
    from dynaplan.fleet.host.gpu_uses import uses_reader
    from dynaplan.process.node_directory import node_dir

    return uses_reader(gpus, node_dir(os.environ))


def gpu_activity(gpus: Sequence[Gpu]) -> Callable[[], Mapping[int, GpuActivity]]:
    """Return the reader of these GPUs' utilisation and watts; it may block, and never raises."""
    from dynaplan.fleet.host.gpu_uses import activity_reader
    from dynaplan.process.node_directory import node_dir

    return activity_reader(gpus, node_dir(os.environ))


def gpu_claims(arbiter: ProcessIdentity, namespace: str, worker: str = "") -> Claims:
    """Return this arbiter's claims, which keep the arbiters of the machine off each other's GPUs.

    ``worker`` is the name of a worker that claims for itself, as its own arbiter.
    """
    from dynaplan.fleet.gpu_claims import NodeClaims
    from dynaplan.process.node_directory import node_dir

    return NodeClaims(arbiter, namespace, node_dir(os.environ), worker=worker)


def port_holder(port: int) -> str:
    """Return the process that listens on that TCP port, in words; empty when none is seen."""
    from dynaplan.fleet.host import port_holders

    return port_holders.port_holder(port)


def deployments_of_machine() -> dict[int, tuple[str, Path | None]]:
    """Return all users' deployments that hold GPUs: pid of ``serve`` -> words, and where its statefile is."""
    from dynaplan.fleet.gpu_claims import claimants
    from dynaplan.process.node_directory import node_dir

    return claimants(node_dir(os.environ))


def this_process() -> LeaseOwner:
    """Return this process as the owner of its leases."""
    from dynaplan.store import lease_owners

    return lease_owners.this_process()


def process_watch(died: Callable[[LeaseOwner], None]) -> ProcessWatch:
    """Return a watch over processes of this machine; it calls ``died`` with one as soon as it ends."""
    from dynaplan.store import lease_owners

    return lease_owners.OwnerWatcher(died)
