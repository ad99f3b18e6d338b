"""Preparation: all checks, and all that a deployment holds, before the first process is started.

What can go wrong for the user goes wrong here. Each step that takes something puts its undoing on the exit
stack, so that everything is given back in reverse order: the namespace's locks at the very end, and before
them the GPUs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from dynaplan.config import certificates
from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.config.settings.servers import CA_VARIABLE, COMPAT_VARIABLE, TlsSettings, client_environment
from dynaplan.config.settings.worker import ProcessSettings
from dynaplan.contract.gpus import Gpu
from dynaplan.contract.store_keys import fleet_key, scaling_prefix
from dynaplan.fleet import gpu_inventory
from dynaplan.fleet.capped_limits import set_back
from dynaplan.fleet.deployments import port_holder
from dynaplan.fleet.gpu_claims import Claims, NodeClaims
from dynaplan.fleet.gpu_devices import available_gpus
from dynaplan.fleet.launch import ENDPOINT_SOCKET, EVENTS_SOCKET, LAUNCH_FILE, Launch
from dynaplan.fleet.plugin.document import new_document
from dynaplan.fleet.plugin.gpu_availability import GpuClaims
from dynaplan.fleet.reattach.processes import PUBLIC_SOCKET_NAME, SupervisedFleet
from dynaplan.fleet.rules.allocation import check_fits
from dynaplan.fleet.rules.reconcile import reconcile
from dynaplan.fleet.rules.statefile import Document, arbiter_of, with_fleet
from dynaplan.fleet.runtime_dir import (
    CLIENTS_FILE,
    address_directory,
    ensure_link,
    hold_port,
    make_runtime_directory,
    new_token,
    read_token,
    remove_runtime_directory,
    runtime_directory,
    scratch_directory,
    token_path,
    write_private,
)
from dynaplan.fleet.servers import (
    OwnPlaces,
    ServerSpec,
    SharedServers,
    all_servers,
    move_all_into_memory,
)
from dynaplan.fleet.statefile_store import DocumentStore, NamespaceLock, StatefileStore, statefile_path
from dynaplan.fleet.watchers import listening_services, services_stopped_first
from dynaplan.graph.lifecycle import Worker
from dynaplan.graph.model import GraphSpec
from dynaplan.process import process_table
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.kernel import TRACKERS_TIMEOUT_S
from dynaplan.process.ports import Processes
from dynaplan.process.signals import signals_blocked
from dynaplan.process.supervisor_link import SupervisorLink
from dynaplan.store import connections
from dynaplan.store.model import Transaction
from dynaplan.util.errors import (
    ConfigError,
    DeploymentError,
    PermanentError,
    StatefileCorrupt,
    StatefileUnwritable,
    TemporaryError,
)
from dynaplan.util.log_lines import LogLines
from dynaplan.util.sockets import MAX_PORT, free_port

log = logging.getLogger(__name__)

Config = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class ServeOptions:
    """The options of ``dynaplan serve``.

    ``gpus`` is the number of GPUs to use (None: all); ``log_dir`` and ``state_dir`` have defaults of their
    own. Requests get ``drain_timeout_s`` seconds to finish when everything ends, ``leave_timeout_s`` when one
    worker leaves and the others go on. ``use_busy_gpus`` takes GPUs whose memory other programs use, too.
    ``config_file`` and ``overrides`` are what the configuration was read from. ``model_memory_bytes`` bounds
    what models that are loaded on request take of each GPU, or of the host; 0 is all of it. ``power_caps``
    are those of GPUs, as ``parse_power_cap`` reads them.
    """

    host: str = FrontendSettings.host
    port: int = FrontendSettings.port
    gpus: int | None = None
    circus_tcp: bool = False
    api_key: str | None = None
    drain_timeout_s: float = 30.0
    leave_timeout_s: float = ProcessSettings.drain_deadline_s
    log_dir: Path | None = None
    state_dir: Path | None = None
    use_busy_gpus: bool = False
    exit_on_failure: bool = False
    token_file: Path | None = None
    config_file: Path | None = None
    overrides: tuple[str, ...] = ()
    model_memory_bytes: int = 0
    power_caps: tuple[str, ...] = ()


PERF_BOOST = "CUDA_DISABLE_PERF_BOOST"


@dataclass(frozen=True)
class Preparation:
    """The result of preparing: deployment, first workers, servers; ``notes`` are for the user.

    ``public_socket`` is bound to the public port; None when no service of the graph listens on it.
    ``store_outlives``: the key-value store is the user's, and stays when the deployment ends.
    ``supervised_fleet`` are the processes of workers as children of the supervisor; None without one.
    """

    launch: Launch
    workers: tuple[Worker, ...]
    servers: tuple[ServerSpec, ...]
    is_simulated: bool
    notes: tuple[str, ...]
    public_socket: socket.socket | None = None
    store_outlives: bool = False
    supervised_fleet: SupervisedFleet | None = None


Supervision = SupervisorLink | None
"""The link to the supervisor above this process; None without one."""


def prepare(
    graph: GraphSpec, config: Config, options: ServeOptions, stack: ExitStack, link: Supervision = None
) -> Preparation:
    """Check everything and take hold of everything. Raises a UserError that says what is in the way.

    The supervisor, if there is one, stands for the arbiter and keeps the locks.
    """
    ports = _checked_circus_ports(options.circus_tcp)
    statefile = _statefile_of(graph, options)
    arbiter = process_table.identity_of(link.supervisor_pid if link else os.getpid())
    notes = _take_namespace(statefile, arbiter, stack, link)
    gpus, is_simulated = available_gpus(options.gpus)
    claims = partial(NodeClaims, arbiter, graph.namespace)
    workers, left_out = first_workers(graph, gpus, claims, stack, options.use_busy_gpus, bool(notes))
    public_socket = _public_socket(graph, options, stack, link)
    log_dir = _log_dir(graph.namespace, options)
    runtime_dir, address_dir = _runtime_directory(statefile, stack)
    with _usable(runtime_dir):
        kept = partial(keep, link, "scratch directory")
        scratch_dir = stack.enter_context(scratch_directory(graph.namespace, runtime_dir, os.environ, kept))
        servers = all_servers(graph, config, OwnPlaces(runtime_dir, address_dir, scratch_dir))
        moved = move_all_into_memory(servers.started, scratch_dir)
    endpoint, events = _circus_endpoints(address_dir, ports)
    bare = Launch(
        graph=graph,
        gpus=gpus,
        arbiter=arbiter,
        config=config,
        runtime_dir=runtime_dir,
        log_dir=log_dir,
        statefile=statefile,
        circus_endpoint=endpoint,
        circus_events=events,
        host=options.host,
        port=public_socket.getsockname()[1] if public_socket else options.port,
        scratch_dir=scratch_dir,
        address_dir=address_dir,
    )
    launch = _with_options(bare, options)
    _publish(launch, servers, options, workers, stack)
    return Preparation(
        launch,
        workers,
        servers.started,
        is_simulated,
        notes=(*notes, *left_out, *moved),
        public_socket=public_socket,
        store_outlives=servers.store_outlives,
        supervised_fleet=SupervisedFleet(link, {}, services_stopped_first(graph), {}) if link else None,
    )


def _statefile_of(graph: GraphSpec, options: ServeOptions) -> Path:
    """Return the deployment's statefile; every process finds its directory in the environment."""
    if options.state_dir:
        os.environ["DYN_LOCAL_STATE_DIR"] = str(options.state_dir)
    return statefile_path(os.environ, graph.namespace)


def _with_options(launch: Launch, options: ServeOptions) -> Launch:
    """Return the launch with what the user has asked for, and the environment says of TLS."""
    return replace(
        launch,
        is_protected=bool(options.api_key),
        drain_timeout_s=options.drain_timeout_s,
        leave_timeout_s=options.leave_timeout_s,
        uses_busy_gpus=options.use_busy_gpus,
        is_tls=bool(TlsSettings.from_environment(os.environ).tls_cert),
        config_file=str(options.config_file or ""),
        overrides=options.overrides,
        model_memory_bytes=options.model_memory_bytes,
        power_caps=options.power_caps,
    )


def _publish(
    launch: Launch,
    servers: SharedServers,
    options: ServeOptions,
    workers: tuple[Worker, ...],
    stack: ExitStack,
) -> None:
    """Write what other processes read of the deployment: its environment, private files and statefile."""
    if servers.store_outlives:
        stack.callback(forget_decisions, launch.namespace)
    os.environ.update(_environment(launch, servers, options))
    _write_private_files(launch)
    _write_statefile(launch, workers, stack)


def _take_namespace(
    statefile: Path, arbiter: ProcessIdentity, stack: ExitStack, link: Supervision
) -> list[str]:
    """Take the namespace, and clear up what is left of its last deployment; return lines for the user."""
    with _as_deployment_error():
        # A signal after the lock is taken, and before the stack knows of it, would leave its file behind.
        with signals_blocked():
            lock = stack.enter_context(NamespaceLock(statefile, arbiter.pid))
        keep(link, "namespace lock", lock.fileno())
        set_back(statefile)
        stack.callback(set_back, statefile)
        return clear_leftovers(StatefileStore(statefile), process_table, arbiter)


def keep(link: Supervision, name: str, descriptor: int) -> None:
    """Have the supervisor keep a descriptor, if there is a supervisor."""
    if link:
        link.keep(name, descriptor)


def _write_private_files(launch: Launch) -> None:
    """Write what the commands beside ``serve`` and the fleet plugin read."""
    with _usable(launch.runtime_dir):
        write_private(launch.runtime_dir / CLIENTS_FILE, json.dumps(_clients_environment()))
        write_private(launch.runtime_dir / LAUNCH_FILE, launch.to_json())


def _runtime_directory(statefile: Path, stack: ExitStack) -> tuple[Path, Path]:
    """Recreate the runtime directory; return it, and the path by which its sockets are addressed."""
    runtime_dir = runtime_directory(statefile)
    address_dir = address_directory(runtime_dir, os.environ)
    stack.callback(remove_runtime_directory, runtime_dir)
    if address_dir != runtime_dir:
        stack.callback(address_dir.unlink, missing_ok=True)
    with _usable(runtime_dir):
        make_runtime_directory(runtime_dir)
    with _usable(address_dir):
        ensure_link(address_dir, runtime_dir)
    return runtime_dir, address_dir


def forget_decisions(namespace: str) -> None:
    """Delete the decisions from a store that outlives us: the next deployment follows its configuration."""

    async def forget() -> None:
        store = connections.connect_store()
        try:
            keys = tuple(item.key for item in await store.list(scaling_prefix(namespace)))
            await store.commit(Transaction(deletes=(*keys, fleet_key(namespace))))
        finally:
            await store.close()

    try:
        asyncio.run(forget())
    except (TemporaryError, PermanentError) as error:
        log.warning("the decisions stay in the key-value store: %s", error)


@contextmanager
def _usable(runtime_dir: Path) -> Iterator[None]:
    """Raise an OSError of the block as DeploymentError, with what the user can do about the directory."""
    try:
        yield
    except OSError as error:
        raise DeploymentError(
            f"cannot use the runtime directory {runtime_dir}: {error.strerror}",
            hint="Free space or give write permission there, or set DYN_LOCAL_STATE_DIR to another one.",
        ) from error


@contextmanager
def _as_deployment_error() -> Iterator[None]:
    """Raise a StatefileUnwritable of the block as DeploymentError: at the start nothing is to be retried."""
    try:
        yield
    except StatefileUnwritable as error:
        raise DeploymentError(str(error.args[0]), hint=error.hint) from error


def first_workers(
    graph: GraphSpec,
    gpus: Sequence[Gpu],
    make_claims: Callable[[], Claims],
    stack: ExitStack,
    uses_busy: bool,
    has_killed: bool = False,
) -> tuple[tuple[Worker, ...], list[str]]:
    """Claim the GPUs of the configured workers; return these, and lines about GPUs that others have.

    The claims end with ``stack``. ``uses_busy``: GPUs whose memory other programs use will do, too.
    ``has_killed``: leftovers were killed a moment ago, whose memory may not be free yet. Raises CapacityError
    when the workers do not fit.
    """
    claims = GpuClaims(make_claims(), gpus)
    # Not by ``claims``: the fleet plugin has claimed more in our name.
    stack.callback(give_back, make_claims, gpus)
    foreign = claims.held_by_others()
    busy = gpu_inventory.in_use(gpus, foreign, gpu_inventory.GPU_FREE_TIMEOUT_S if has_killed else 0.0)
    notes = gpu_inventory.notes(gpus, foreign, busy, uses_busy)
    unusable = foreign if uses_busy else {**busy, **foreign}
    while True:
        check_fits(graph, gpus, unusable)
        workers = reconcile(graph, (), {}, gpus, unusable, time.monotonic()).fleet
        missed = claims.claim_for(workers)
        if not missed:
            return workers, notes
        unusable |= missed


def give_back(make_claims: Callable[[], Claims], gpus: Sequence[Gpu]) -> None:
    GpuClaims(make_claims(), gpus).release_unused(())


def _public_socket(
    graph: GraphSpec, options: ServeOptions, stack: ExitStack, link: Supervision
) -> socket.socket | None:
    """Hold the port for as long as this process lives; a graph without a listening service needs none."""
    if not listening_services(graph):
        return None
    bound = stack.enter_context(hold_port(options.host, options.port, port_holder))
    keep(link, PUBLIC_SOCKET_NAME, bound.fileno())
    return bound


def _log_dir(namespace: str, options: ServeOptions) -> Path:
    """Return the directory of the logs; this process logs there too from now on."""
    directory = log_directory(namespace, options.log_dir)
    log_to(directory / "circus.log")
    return directory


def log_directory(namespace: str, given: Path | None = None) -> Path:
    """Return the directory of a deployment's logs, made if need be; DeploymentError if it cannot be."""
    base = os.environ.get("DYN_CIRCUS_LOG_DIR")
    default = (Path(os.path.expanduser(base)) if base else Path.home() / ".dynamo" / "logs") / namespace
    directory = (given or default).absolute()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"is there permission, and space?")
    except OSError as error:
        raise DeploymentError(
            f"cannot write logs to {directory}: {error.strerror}",
            hint="Free space or give write permission there, or set DYN_CIRCUS_LOG_DIR to another directory.",
        ) from error
    return directory


def log_to(path: Path) -> None:
    """Send the logs of circus and of libraries to a file, never to the user, even if the disk is full."""
    logging.raiseExceptions = False
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    handler = logging.FileHandler(path, delay=True)
    handler.setFormatter(LogLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


def _checked_circus_ports(is_tcp: bool) -> tuple[int, int] | None:
    """Return circus' two TCP ports, when asked for; ConfigError for wrong ones, and for wrong certificates.

    Every user of the machine can connect to them.
    """
    certificates.check(os.environ)
    endpoint, events = "DYN_CIRCUS_ENDPOINT_PORT", "DYN_CIRCUS_PUBSUB_PORT"
    if is_tcp or (os.environ.get(endpoint) and os.environ.get(events)):
        return _circus_port(endpoint), _circus_port(events)
    return None


def _circus_port(variable: str) -> int:
    text = os.environ.get(variable, "")
    if text:
        if text.isdecimal() and 0 < int(text) <= MAX_PORT:
            return int(text)
        raise ConfigError(f"{variable} is {text!r}", hint=f"Expected a free port from 1 to {MAX_PORT}.")
    try:
        return free_port()
    except OSError as error:
        raise ConfigError(f"circus: {error.strerror}", hint=f"Set {variable} to a free one.") from error


def _circus_endpoints(address_dir: Path, ports: tuple[int, int] | None) -> tuple[str, str]:
    """Return circus' two endpoints: sockets in the private directory, or these ports."""
    if ports:
        endpoint, events = (f"tcp://127.0.0.1:{port}" for port in ports)
        return endpoint, events
    return f"ipc://{address_dir / ENDPOINT_SOCKET}", f"ipc://{address_dir / EVENTS_SOCKET}"


def _environment(launch: Launch, servers: SharedServers, options: ServeOptions) -> Mapping[str, str]:
    """Return the variables that every process of the deployment gets beyond this one's."""
    return {
        **servers.environment,
        # Else a GPU stays at its highest clock while a process has a CUDA context, which costs 26 to 66 W
        # (arXiv 2605.23918). Drivers before 580.105.08 do not know it.
        PERF_BOOST: os.environ.get(PERF_BOOST, "1"),
        "DYNAMO_SERVICE_CONFIG": json.dumps(launch.config),
        "DYN_NAMESPACE": launch.namespace,
        "DYNAMO_HOST": launch.host,
        "DYNAMO_PORT": str(launch.port),
        "DYNAPLAN_API_KEY": options.api_key or "",
        "DYNAPLAN_WORKER_TOKEN": _token(launch.statefile, options.token_file),
        "DYNAPLAN_RUNTIME_DIR": str(launch.runtime_dir),
        "DYNAPLAN_LOG_DIR": str(launch.log_dir),
        "DYNAPLAN_SCRATCH_DIR": str(launch.scratch_dir),
        "DYNAPLAN_STATEFILE": str(launch.statefile),
        "DYNAPLAN_PARENT_PID": str(launch.arbiter.pid),
        "DYNAPLAN_DRAIN_DEADLINE_S": f"{launch.leave_timeout_s:g}",
    }


def _token(statefile: Path, file: Path | None) -> str:
    """Return the token in ``file``, else the one kept beside the statefile, else a new one, kept nowhere."""
    if file:
        return read_token(file)
    path = token_path(statefile)
    return read_token(path) if path.exists() else new_token()


def _clients_environment() -> dict[str, str]:
    """Return the variables with which the commands beside ``serve`` reach the deployment."""
    names = (
        "DYN_NAMESPACE",
        "DYNAPLAN_WORKER_TOKEN",
        "DYNAPLAN_API_KEY",
        "DYNAPLAN_RUNTIME_DIR",
        "DYNAPLAN_LOG_DIR",
        "DYNAPLAN_SCRATCH_DIR",
        COMPAT_VARIABLE,
        CA_VARIABLE,
    )
    own = {name: os.environ[name] for name in names if name in os.environ}
    return own | client_environment(os.environ)


def _write_statefile(launch: Launch, workers: tuple[Worker, ...], stack: ExitStack) -> None:
    """Write the document with its first workers, about to start; from here on the fleet plugin writes it."""
    store = StatefileStore(launch.statefile)
    stack.callback(store.remove)
    with _as_deployment_error():
        store.write(with_fleet(new_document(launch), workers))


def clear_leftovers(
    store: DocumentStore, processes: Processes, own: ProcessIdentity | None = None
) -> list[str]:
    """End and remove what an earlier deployment left; return sentences for the user.

    Raises DeploymentError while its arbiter still runs, unless that is ``own``.
    """
    try:
        document = store.read()
    except StatefileCorrupt as error:
        return [f"The statefile of an earlier run is set aside as {store.set_aside()} ({error})."]
    if document is None:
        return []
    arbiter = arbiter_of(document)
    if arbiter and arbiter != own and processes.is_alive(arbiter):
        raise DeploymentError(
            f"namespace {document['namespace']} is already running here (pid {arbiter.pid})",
            hint="Stop it with `dynaplan stop`, or choose another one with --namespace.",
        )
    ended = end_leftovers(document, processes, own)
    store.remove()
    return ["An earlier run ended without cleaning up; that is done now.", *ended]


def end_leftovers(document: Document, processes: Processes, own: ProcessIdentity | None = None) -> list[str]:
    """End the processes that a dead arbiter's deployment left running; return one sentence per session.

    Does nothing while the arbiter lives, unless it is ``own``, after a reboot, or for entries without pid and
    start time: a process that cannot be recognised for certain is left alone. Embedded servers may stand
    beside the workers, under ``servers``, as name -> pid and started_at.
    """
    arbiter = arbiter_of(document)
    boot_id = processes.identity_of(os.getpid()).boot_id
    if arbiter is None or arbiter.boot_id != boot_id or (arbiter != own and processes.is_alive(arbiter)):
        return []
    ended = []
    entries = {**document.get("components", {}), **document.get("servers", {})}
    for name, entry in entries.items():
        pid, started_at = int(entry.get("pid", 0)), int(entry.get("started_at", 0))
        if not pid or not started_at:
            continue
        if members := processes.kill_group(pid, started_at, waits_s=TRACKERS_TIMEOUT_S):
            ended.append(
                f"killed {name} (session {pid}, {len(members)} processes), left by arbiter {arbiter.pid}"
            )
    return ended
