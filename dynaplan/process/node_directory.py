"""The directory that all deployments of a machine share, and locks on files in it.

Everybody may write to it and nobody may remove the files of others (mode 1777). A lock is an flock on a small
file: the kernel takes it away when the last process that holds it ends, however it ends, so nothing has
to be cleaned up after a crash and nobody can take another's lock. What it cannot prevent: another user of
the machine may hold locks for no reason, and the owner of the directory, the first user or root, may remove
files that are locked.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dynaplan.util.errors import DeploymentError

NODE_VARIABLE = "DYNAPLAN_NODE_DIR"

HINT = f"Set {NODE_VARIABLE} to a directory that all users of the GPUs share, mode 1777."


def open_node_directory(path: Path) -> int:
    """Open the directory of machine-wide locks (GPUs, ports), made if need be; return its descriptor.

    Children do not inherit the descriptor. Raises DeploymentError for a directory from which other users may
    remove our files, OSError for a symbolic link and when it cannot be opened or made.
    """
    try:
        os.mkdir(path, 0o700)
        is_new = True
    except FileExistsError:
        is_new = False
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if is_new:
        os.fchmod(fd, 0o1777)
    status = os.fstat(fd)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        os.close(fd)
        raise DeploymentError(f"everybody may remove files from {path}", hint=HINT)
    return fd


def try_lock(directory: int, name: str) -> int | None:
    """Take the lock of that name, a file that is made if need be; return the descriptor that holds it.

    None when somebody else has the lock, or what has the name is no plain file. Raises OSError. A child gets
    the descriptor only if the caller passes it on; then the lock is held until both have closed it.
    """
    while True:
        fd = _open_lock_file(directory, name)
        if fd is None:
            return None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                return None
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        if _is_at(fd, directory, name):
            return fd
        # It was removed by its last holder after we had opened it: another file may stand there now.
        os.close(fd)


def unlock(directory: int, name: str, fd: int) -> None:
    """Give the lock back and remove its file, unless a child has inherited the lock and still holds it."""
    os.close(fd)
    remove_unlocked(directory, name)


def remove_unlocked(directory: int, name: str) -> None:
    """Remove the file of a lock that nobody holds; another user's stays for the next one."""
    fd = try_lock(directory, name)
    if fd is None:
        return
    try:
        os.unlink(name, dir_fd=directory)
    except OSError:
        pass
    os.close(fd)


def _open_lock_file(directory: int, name: str) -> int | None:
    """Open the file, made for all to lock; None when it cannot be one (a link, a pipe, a folder)."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            return os.open(name, flags, dir_fd=directory)
        except FileNotFoundError:
            pass
        except OSError:
            return None
        try:
            # Not O_CREAT alone: the kernel refuses that for others' files here (fs.protected_regular).
            fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=directory)
        except FileExistsError:
            continue
        os.fchmod(fd, 0o644)
        return fd


def _is_at(fd: int, directory: int, name: str) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(name, dir_fd=directory, follow_symlinks=False))
    except FileNotFoundError:
        return False


DEFAULT_DIRECTORY = Path("/tmp/dynaplan-gpus")


def node_dir(environ: Mapping[str, str]) -> Path:
    """Return the directory of the claims: ``DYNAPLAN_NODE_DIR``, or ``/tmp/dynaplan-gpus``."""
    return Path(environ.get(NODE_VARIABLE) or DEFAULT_DIRECTORY).absolute()
