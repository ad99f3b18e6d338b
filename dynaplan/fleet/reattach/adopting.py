"""Adopting: a ``serve`` that was killed and started again by its supervisor continues where the last one was.

What the last one knew the supervisor keeps, in memory: the launch, the environment of all processes, and what
the servers are. So a graph or a file that was changed meanwhile changes nothing; ``dynaplan reload`` does.
What does not fit together, such as a statefile that is gone, is no deployment: all of it is ended, and
``serve`` starts anew.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import dynaplan
from dynaplan.fleet.capped_limits import set_back
from dynaplan.fleet.gpu_claims import NodeClaims
from dynaplan.fleet.launch import CurrentLaunch, Launch
from dynaplan.fleet.preparation import Preparation, forget_decisions, give_back, log_to
from dynaplan.fleet.reattach.processes import PUBLIC_SOCKET_NAME, SupervisedFleet
from dynaplan.fleet.reattach.versions import check_own_package
from dynaplan.fleet.rules.statefile import arbiter_of, fleet_of
from dynaplan.fleet.runtime_dir import remove_runtime_directory, remove_scratch
from dynaplan.fleet.servers import ServerSpec
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.fleet.watchers import services_stopped_first
from dynaplan.graph.lifecycle import Worker
from dynaplan.process import process_table
from dynaplan.process.kernel import TRACKERS_TIMEOUT_S
from dynaplan.process.supervisor_link import SupervisorLink, SupervisorState
from dynaplan.util.errors import DeploymentError, StatefileCorrupt

log = logging.getLogger(__name__)

DEPLOYMENT = "deployment"
"""The name by which the supervisor keeps what a ``serve`` after this one needs."""

MODULES_PATH = ("PYTHONPATH",)
"""The variables that all processes have of this ``serve``, which may be of another version than the last."""


@dataclass(frozen=True)
class Handover:
    """The facts that one ``serve`` leaves to the next."""

    launch: Launch
    environment: Mapping[str, str]
    servers: tuple[ServerSpec, ...]
    is_simulated: bool
    store_outlives: bool
    exits_on_failure: bool

    @classmethod
    def read(cls, descriptor: int) -> Handover:
        """Read what ``save_handover`` wrote; KeyError, TypeError or ValueError for anything else."""
        os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, closefd=False) as file:
            document = json.load(file)
        return cls(
            Launch.from_json(document["launch"]),
            document["environment"],
            tuple(map(ServerSpec.from_json, document["servers"])),
            document["is_simulated"],
            document["store_outlives"],
            document["exits_on_failure"],
        )


def save_handover(prepared: Preparation, exits_on_failure: bool) -> None:
    """Have the supervisor keep what the next ``serve`` needs, and which files to remove without one."""
    if prepared.supervised_fleet is None:
        return
    launch, link = prepared.launch, prepared.supervised_fleet.link
    document = {
        "launch": launch.to_json(),
        "environment": dict(os.environ),
        "servers": [each.to_json() for each in prepared.servers],
        "is_simulated": prepared.is_simulated,
        "store_outlives": prepared.store_outlives,
        "exits_on_failure": exits_on_failure,
    }
    link.keep_text(DEPLOYMENT, json.dumps(document).encode())
    link.remove_at_the_end(
        [
            launch.statefile,
            launch.statefile.with_name(f"{launch.statefile.name}.tmp"),  # a writer was killed amid its work
            launch.statefile.with_suffix(".lock"),
            launch.scratch_dir,
            launch.runtime_dir,
            *([launch.address_dir] if launch.address_dir != launch.runtime_dir else []),
            launch.statefile.with_suffix(".serve.lock"),
        ],
        [launch.scratch_dir.parent, *launch.runtime_dir.parents[:2]],
        NodeClaims(launch.arbiter, launch.namespace).claim_files(gpu.uuid for gpu in launch.gpus),
    )


def adopt_deployment(link: SupervisorLink, stack: ExitStack) -> tuple[Preparation, bool] | None:
    """Return the deployment that runs under the supervisor, and whether it is to end on a failure.

    None when it cannot be adopted: then what is left of it has been ended. Until this process has told the
    supervisor that it runs, ``stack`` must not be unwound: that would take away what a running deployment
    needs. Raises DeploymentError in a new version that cannot read what the version before has written, which
    then goes on.
    """
    check_own_package(os.environ, is_trial=link.is_trial)
    held = link.hello()
    found = _read_consistent(held, link)
    if found is None and link.is_trial:
        raise DeploymentError(
            f"dynaplan {dynaplan.__version__} cannot read what the deployment has written down",
            hint="Its own version goes on. `dynaplan stop`, then `dynaplan serve`, starts this one.",
        )
    if found is None:
        _end_everything(held, link)
        return None
    handover, workers = found
    launch = CurrentLaunch(handover.launch).now
    own_path = {name: os.environ[name] for name in MODULES_PATH if name in os.environ}
    os.environ.clear()
    os.environ.update({name: text for name, text in handover.environment.items() if name not in MODULES_PATH})
    os.environ.update(own_path)
    os.chdir(launch.graph.working_dir)
    log_to(launch.circus_log)
    public_socket = _public_socket(held, stack)
    _take_over(handover, stack)
    names = {each.name for each in workers} | {f"{launch.namespace}_{each.name}" for each in handover.servers}
    _end({name: pid for name, pid in held.pids.items() if name not in names})
    adoptable = {name: pid for name, pid in held.pids.items() if name in names}
    note = f"Adopted {len(adoptable)} processes that went on for {held.away_s:.1f} s without serve."
    log.info("%s", note)
    prepared = Preparation(
        launch,
        workers,
        handover.servers,
        handover.is_simulated,
        notes=(note,),
        public_socket=public_socket,
        store_outlives=handover.store_outlives,
        supervised_fleet=SupervisedFleet(link, adoptable, services_stopped_first(launch.graph), held.ended),
    )
    return prepared, handover.exits_on_failure


def _read_consistent(
    held: SupervisorState, link: SupervisorLink
) -> tuple[Handover, tuple[Worker, ...]] | None:
    """Return the handover, and the workers of the statefile whose processes the supervisor holds.

    None when either cannot be read, or they are not of this supervisor's deployment.
    """
    if DEPLOYMENT not in held.kept:
        return None
    try:
        handover = Handover.read(held.kept[DEPLOYMENT])
        document = StatefileStore(handover.launch.statefile).read()
    except (KeyError, TypeError, ValueError, OSError, StatefileCorrupt) as error:
        log.warning("nothing to adopt: %r", error)
        return None
    supervisor = process_table.identity_of(link.supervisor_pid)
    if document is None or arbiter_of(document) != supervisor or handover.launch.arbiter != supervisor:
        return None
    if not handover.launch.runtime_dir.is_dir():
        return None
    return handover, tuple(each for each in fleet_of(document) if each.name in held.pids)


def _take_over(handover: Handover, stack: ExitStack) -> None:
    """Put on the stack what gives back all that the last ``serve`` had taken, in the order of taking."""
    launch = handover.launch
    store = StatefileStore(launch.statefile)
    stack.callback(launch.statefile.with_suffix(".serve.lock").unlink, missing_ok=True)
    claims = partial(NodeClaims, launch.arbiter, launch.namespace)
    stack.callback(give_back, claims, launch.gpus)
    stack.callback(remove_runtime_directory, launch.runtime_dir)
    if launch.address_dir != launch.runtime_dir:
        stack.callback(launch.address_dir.unlink, missing_ok=True)
    stack.callback(remove_scratch, launch.scratch_dir)
    if handover.store_outlives:
        stack.callback(forget_decisions, launch.namespace)
    stack.callback(store.remove)
    stack.callback(set_back, launch.statefile)


def _public_socket(held: SupervisorState, stack: ExitStack) -> socket.socket | None:
    descriptor = held.kept.get(PUBLIC_SOCKET_NAME)
    return None if descriptor is None else stack.enter_context(socket.socket(fileno=descriptor))


def _end_everything(held: SupervisorState, link: SupervisorLink) -> None:
    """End what the last ``serve`` has left, and have the supervisor keep nothing of it."""
    _end(held.pids)
    for name, descriptor in held.kept.items():
        link.drop(name)
        os.close(descriptor)
    link.remove_at_the_end([])


def _end(pids: Mapping[str, int]) -> None:
    processes = process_table
    for name, pid in pids.items():
        log.warning("ending %s (session %d), which is nobody's", name, pid)
        processes.kill_group(pid, processes.identify(pid) or 0, waits_s=TRACKERS_TIMEOUT_S)
