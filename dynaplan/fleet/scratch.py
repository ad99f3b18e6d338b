"""A directory in memory for what the workers of a deployment hand each other.

Private to the user (mode 0700). A worker's own files begin with ``{worker_name}.`` and go with its processes,
the whole directory goes with ``serve``; what a killed ``serve`` has left, the next one of that name removes.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from dynaplan.fleet.runtime_dir import make_private_directory
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

DEFAULT_MEMORY = Path("/dev/shm")
MOST_NAMESAKES = 100


@contextmanager
def scratch_directory(
    namespace: str,
    runtime_dir: Path,
    environ: Mapping[str, str],
    keep: Callable[[int], None] = lambda descriptor: None,
) -> Iterator[Path]:
    """``/dev/shm/dynaplan-{uid}/{namespace}``, new and empty, until the end of the context.

    ``DYNAPLAN_MEMORY_DIR`` stands in for ``/dev/shm``.
    With a number behind when a deployment of the same name, with another state directory, has that one.
    ``keep`` is called with the descriptor whose lock makes it ours.
    ``runtime_dir/scratch`` when there is no such memory, or somebody else has made our place in it.
    """
    memory = Path(environ.get("DYNAPLAN_MEMORY_DIR") or DEFAULT_MEMORY).absolute()
    root = memory / f"dynaplan-{os.getuid()}"
    try:
        path, held = _held(root, namespace)
    except (OSError, DeploymentError) as error:
        log.warning("no directory in memory, using the runtime directory: %s", error)
        path = runtime_dir / "scratch"
        path.mkdir(mode=0o700)
        yield path
        shutil.rmtree(path, ignore_errors=True)
        return
    keep(held)
    try:
        yield path
    finally:
        remove_scratch(path)
        os.close(held)


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


def _held(root: Path, namespace: str) -> tuple[Path, int]:
    """A directory that no living ``serve`` has, emptied, and the descriptor whose lock makes it ours."""
    if not os.access(root.parent, os.W_OK | os.X_OK):
        raise DeploymentError(f"{root.parent} cannot be used")
    for number in range(MOST_NAMESAKES):
        make_private_directory(root)
        path = root / (f"{namespace}.{number}" if number else namespace)
        with suppress(FileNotFoundError):  # Another deployment ends, and removes the root or this very one.
            descriptor = _locked(path)
            if descriptor is not None:
                _empty(path)
                return path, descriptor
    raise DeploymentError(f"{root} is full of directories of {namespace}")


def _locked(path: Path) -> int | None:
    """Make it unless it exists, and lock it; None when somebody has it."""
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
