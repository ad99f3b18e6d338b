"""The private places of one deployment: its runtime directory, its tokens, its port."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from dynaplan.domain.errors import ConfigError, DeploymentError
from dynaplan.foundation.sockets import holding_socket

LONGEST_SOCKET_NAME = "/circus-events.sock"
LONGEST_SOCKET_PATH_BYTES = 107
"""sun_path is 108 bytes long, with the closing zero."""

CLIENTS_FILE = "clients.json"
"""The environment that a client of the deployment needs, tokens included; mode 0600."""


def runtime_root(environ: Mapping[str, str]) -> Path:
    """Return ``${XDG_RUNTIME_DIR:-/tmp}/dynaplan-$UID``, which holds this user's runtime directories."""
    base = environ.get("XDG_RUNTIME_DIR", "")
    # circus takes a plugin's endpoint apart at white space.
    usable = os.path.isabs(base) and not any(map(str.isspace, base)) and os.access(base, os.W_OK | os.X_OK)
    root = Path(base if usable else "/tmp") / f"dynaplan-{os.getuid()}"
    return root if _fits(root / "123456789012") else Path("/tmp") / f"dynaplan-{os.getuid()}"


def runtime_directory(namespace: str, environ: Mapping[str, str]) -> Path:
    """Return the path of this namespace's runtime directory: short enough for unix sockets in it."""
    root = runtime_root(environ)
    named = root / namespace
    return named if _fits(named) else root / hashlib.sha256(namespace.encode()).hexdigest()[:12]


def make_runtime_directory(directory: Path) -> None:
    """Make it anew and empty, mode 0700, inside a root that is this user's alone.

    Raises DeploymentError when somebody else could read or change what is in it. The caller holds the
    namespace's lock: what lies there is from a deployment that is dead.
    """
    make_private_directory(directory.parent)
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(mode=0o700)


def make_private_directory(directory: Path) -> None:
    """Make it with mode 0700 unless it exists; DeploymentError when it is not this user's alone."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise DeploymentError(
            f"cannot make the runtime directory {directory}: {error.strerror}",
            hint="Set XDG_RUNTIME_DIR to a directory of yours.",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DeploymentError(
            f"the runtime directory {directory} is not private",
            hint="Expected a directory of yours with mode 0700; remove it, or set XDG_RUNTIME_DIR.",
        )


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read, in the place of what was there."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def new_token() -> str:
    """Return a random token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def hold_port(host: str, port: int, holder_of: Callable[[int], str]) -> socket.socket:
    """Bind a socket, not listening, that keeps the port for the Frontends, which share it (SO_REUSEPORT).

    Raises ConfigError when the port is taken or the host is not an address of this machine. Port 0 gets one
    that the kernel chooses. ``holder_of`` names the holder of a port; empty when it is not known.
    """
    try:
        return holding_socket(host, port)
    except socket.gaierror as error:
        raise ConfigError(
            f"--host {host}: {error.strerror}", hint="Expected an address of this machine."
        ) from error
    except OSError as error:
        holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
        fault = f"port {port} of {host} is taken by {holder}" if holder else ""
        raise ConfigError(
            fault or f"cannot use port {port} of {host}: {error.strerror}",
            hint="--port expects a free port; 0 lets the kernel choose one.",
        ) from error


def _fits(directory: Path) -> bool:
    return len(os.fsencode(directory)) + len(LONGEST_SOCKET_NAME) <= LONGEST_SOCKET_PATH_BYTES
