"""The private places of one deployment: its runtime directory, its tokens, its port, its scratch directory.

What must last as long as the deployment lies beside its statefile, where no logout and no cleaner of
temporary files takes it away. Addresses of unix sockets have at most 107 bytes: where the directory's own
path is too long for them, a short link leads there, and a link that vanishes costs nothing to make again.

What the workers hand each other lies in the scratch directory, in memory. A worker's own files there begin
with ``{worker_name}.`` and go with its processes, the whole directory goes with ``serve``; what a killed
``serve`` has left, the user's next one removes, of any name.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dynaplan.util.errors import ConfigError, DeploymentError
from dynaplan.util.sockets import holding_socket

LONGEST_SOCKET = "/circus-events.sock"
MAX_SOCKET_PATH_BYTES = 107
"""sun_path is 108 bytes long, with the closing zero."""

CLIENTS_FILE = "clients.json"
"""The environment that a client of the deployment needs, tokens included; mode 0600."""


TOKEN_SUFFIX = ".token"
MAX_TOKEN_BYTES = 4096
PLAIN_TOKEN = re.compile(r"[\x21-\x7e]{16,}")
"""A token travels in an HTTP header, and must not be guessed."""

TOKEN_HINT = "Make one: `(umask 077; openssl rand -hex 32 > FILE)`, and copy it to every host."

PLAIN_PATH = re.compile(r"[\w./@+-]+", re.ASCII)
"""The paths that may be addresses: circus takes a plugin's endpoint apart at white space, etcd's clients a
list of endpoints at commas."""


def runtime_directory(statefile: Path) -> Path:
    """Return ``run/{hostname}/{namespace}`` beside the statefile; hosts may share a home directory."""
    hostname = os.uname().nodename.replace("/", "_") or "localhost"
    return statefile.parent / "run" / hostname / statefile.name.removesuffix(".json")


def link_root(environ: Mapping[str, str]) -> Path:
    """Return ``${XDG_RUNTIME_DIR:-/tmp}/dynaplan-$UID``, which holds this user's short links.

    A directory of logind's, ``/run/user/$UID``, is passed over unless this user could make it again: it is
    removed at the user's last logout.
    """
    base = environ.get("XDG_RUNTIME_DIR", "")
    usable = os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK)
    root = Path(base) / f"dynaplan-{os.getuid()}"
    lasts = usable and os.access(Path(base).parent, os.W_OK | os.X_OK) and _fits(root / "123456789012")
    return root if lasts else Path("/tmp") / f"dynaplan-{os.getuid()}"


def address_directory(runtime_dir: Path, environ: Mapping[str, str]) -> Path:
    """Return the path by which sockets in the runtime directory are addressed: its own, or a short link's."""
    if _fits(runtime_dir):
        return runtime_dir
    return link_root(environ) / hashlib.sha256(os.fsencode(runtime_dir)).hexdigest()[:12]


def ensure_link(link: Path, target: Path) -> bool:
    """Have ``link`` lead to the runtime directory, and return whether it had to be made.

    Raises DeploymentError when its directory is not this user's alone, OSError when it cannot be made.
    """
    if link == target:
        return False
    make_private_directory(link.parent)
    if link.is_symlink() and os.readlink(link) == str(target):
        return False
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, link)
    return True


def make_runtime_directory(directory: Path) -> None:
    """Recreate the directory empty, mode 0700, in a parent that is this user's alone.

    Raises DeploymentError when somebody else could read or change what is in it. The caller holds the
    namespace's lock: what lies there is from a deployment that is dead.
    """
    make_private_directory(directory.parent)
    if directory.is_symlink() or directory.is_file():
        directory.unlink()
    elif directory.exists():
        shutil.rmtree(directory)
    make_private_directory(directory)


def remove_runtime_directory(directory: Path) -> None:
    """Remove the directory, and the two above it if no other deployment uses them; raises nothing."""
    shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):
        directory.parent.rmdir()
        directory.parent.parent.rmdir()


def make_private_directory(directory: Path) -> None:
    """Make the directory, mode 0700, unless it exists.

    Raises DeploymentError when it cannot be made, or is not this user's alone.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        raise DeploymentError(
            f"cannot make the runtime directory {directory}: {error.strerror}",
            hint="Set DYN_LOCAL_STATE_DIR, or XDG_RUNTIME_DIR, to a directory of yours.",
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DeploymentError(
            f"the runtime directory {directory} is not private",
            hint="Expected a directory of yours with mode 0700; remove it, or set DYN_LOCAL_STATE_DIR, "
            "or XDG_RUNTIME_DIR, to another place.",
        )


def write_private(path: Path, text: str) -> None:
    """Write a new file that only this user can read, atomically in the place of what was there."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def new_token() -> str:
    return secrets.token_urlsafe(32)


def token_path(statefile: Path) -> Path:
    """Return where a namespace's token lies that outlasts every ``serve``, beside its statefile."""
    return statefile.with_name(statefile.name.removesuffix(".json") + TOKEN_SUFFIX)


def read_token(path: Path) -> str:
    """Return the token in the file; ConfigError if there is none, or others than its owner can read it."""
    try:
        with path.open() as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot read the token in {path}: {why}", hint=TOKEN_HINT) from error
    if stat.S_ISREG(status.st_mode) and status.st_mode & 0o077:
        raise ConfigError(f"other users can read the token in {path}", hint=f"Run: chmod 600 {path}")
    if not PLAIN_TOKEN.fullmatch(text):
        raise ConfigError(f"{path} does not hold a token", hint=TOKEN_HINT)
    return text


def ensure_token(statefile: Path, otherwise: Callable[[], str]) -> str:
    """Return the token beside the statefile; where there is none, ``otherwise`` gives one, which is kept.

    Raises ConfigError when what is there cannot be used, DeploymentError when it cannot be written.
    """
    path = token_path(statefile)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(temporary, otherwise() + "\n")
            with suppress(FileExistsError):  # Another process was faster: its token counts.
                os.link(temporary, path)
            temporary.unlink()
    except OSError as error:
        raise DeploymentError(
            f"cannot write the token {path}: {error.strerror}",
            hint="Name one with --token-file, or set DYN_LOCAL_STATE_DIR to a directory of yours.",
        ) from error
    return read_token(path)


def hold_port(
    host: str,
    port: int,
    holder_of: Callable[[int], str],
    bind: Callable[[str, int], socket.socket] = holding_socket,
) -> socket.socket:
    """Bind a socket that keeps the port for the Frontends, which inherit it and listen on it.

    Raises ConfigError when the port is taken or the host is not an address of this machine. Port 0 gets one
    that the kernel chooses. ``holder_of`` names the holder of a port; empty when it is not known.
    """
    try:
        return bind(host, port)
    except OSError as error:
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(
                f"--host {host}: {error.strerror}", hint="Expected an address of this machine."
            ) from error
        holder = holder_of(port) if error.errno == errno.EADDRINUSE else ""
        fault = f"port {port} of {host} is taken by {holder}" if holder else ""
        raise ConfigError(
            fault or f"cannot use port {port} of {host}: {error.strerror}",
            hint="--port expects a free port; 0 lets the kernel choose one.",
        ) from error


def _fits(directory: Path) -> bool:
    is_short = len(os.fsencode(directory)) + len(LONGEST_SOCKET) <= MAX_SOCKET_PATH_BYTES
    return is_short and bool(PLAIN_PATH.fullmatch(str(directory)))


log = logging.getLogger(__name__)

DEFAULT_MEMORY = Path("/dev/shm")
MAX_NAMESAKES = 100


@contextmanager
def scratch_directory(
    namespace: str,
    runtime_dir: Path,
    environ: Mapping[str, str],
    keep: Callable[[int], None] = lambda descriptor: None,
) -> Iterator[Path]:
    """Yield a new, empty directory in memory, ``/dev/shm/dynaplan-{uid}/{namespace}``; removed at the end.

    ``DYNAPLAN_MEMORY_DIR`` replaces ``/dev/shm``. A number is appended where a deployment of the same
    namespace, with another state directory, has that directory. ``keep`` is called with the descriptor of the
    directory's lock. Where there is no such memory, or another user has made the directory, it is
    ``runtime_dir/scratch``, without a lock.
    """
    memory = Path(environ.get("DYNAPLAN_MEMORY_DIR") or DEFAULT_MEMORY).absolute()
    root = memory / f"dynaplan-{os.getuid()}"
    try:
        path, lock = _lock_directory(root, namespace)
    except (OSError, DeploymentError) as error:
        log.warning("no directory in memory, using the runtime directory: %s", error)
        path = runtime_dir / "scratch"
        path.mkdir(mode=0o700)
        yield path
        shutil.rmtree(path, ignore_errors=True)
        return
    keep(lock)
    try:
        yield path
    finally:
        remove_scratch(path)
        os.close(lock)


def remove_scratch(path: Path) -> None:
    """Remove the directory of a deployment, and the one above it if no other deployment uses that."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.parent.rmdir()


def remove_files_of(worker_name: str, directory: Path) -> None:
    """Remove what a worker has left there, once its processes are gone."""
    try:
        left = [entry for entry in os.scandir(directory) if entry.name.startswith(f"{worker_name}.")]
    except OSError:
        return
    for entry in left:
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.unlink(entry.path)


def _lock_directory(root: Path, namespace: str) -> tuple[Path, int]:
    """Lock and empty a directory that no other ``serve`` uses; return it and the lock's descriptor."""
    if not os.access(root.parent, os.W_OK | os.X_OK):
        raise DeploymentError(f"{root.parent} cannot be used")
    make_private_directory(root)
    with suppress(FileNotFoundError):  # the same is done by another one
        _remove_abandoned(root)
    for number in range(MAX_NAMESAKES):
        make_private_directory(root)
        path = root / (f"{namespace}.{number}" if number else namespace)
        with suppress(FileNotFoundError):  # Another deployment ends, and removes the root or this very one.
            descriptor = _locked(path)
            if descriptor is not None:
                _empty(path)
                return path, descriptor
    raise DeploymentError(f"{root} is full of directories of {namespace}")


def _remove_abandoned(root: Path) -> None:
    """Remove what killed deployments of this user have left there, whatever their names: it takes memory."""
    for entry in os.scandir(root):
        if entry.is_dir(follow_symlinks=False) and (descriptor := _locked(Path(entry.path))) is not None:
            shutil.rmtree(entry.path, ignore_errors=True)
            os.close(descriptor)


def _locked(path: Path) -> int | None:
    """Make the directory unless it exists, and lock it; return the lock's descriptor.

    None when another process has the lock, or has removed the directory meanwhile.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _empty(path: Path) -> None:
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
