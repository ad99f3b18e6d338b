"""The directory of a store: private, on this machine's own disk or memory, and not behind a link."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from dynaplan.util.errors import ConfigError

HINT = (
    "Set DYN_FILE_KV to a directory of your own on this machine, mode 0700, or to one that is not there yet."
)

OTHERS_MAY = stat.S_IRWXG | stat.S_IRWXO

SHARED_FILE_SYSTEMS = re.compile(
    "9p|afs|beegfs|ceph|cifs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|pvfs2|smb[23]|smbfs"
    r"|fuse\.(?!fuse-overlayfs$|ext4$|ntfs-3g$).*"
)
"""Types of file systems to which several machines may write: locks and notices of changes do not reach all
of them. Some of FUSE, a file system in a process of this machine, have disks of its own."""


def open_store_directory(path: Path, *, makes_parents: bool = False) -> int:
    """Open the directory, made with mode 0700 if need be; return a descriptor that is not inherited.

    Raises ConfigError for one that others can reach, and OSError for one that cannot be used now.
    """
    if makes_parents:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError:
        # A read-only file system says so although the directory is there.
        if not path.is_dir():
            raise
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, FileNotFoundError) as error:
        if path.is_symlink() or path.exists():
            raise _refused(path, "is a link or a file, not a directory") from error
        raise
    except OSError as error:
        if path.is_symlink():
            raise _refused(path, "is a link") from error
        raise
    try:
        _check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _refused(path, f"belongs to another user (uid {status.st_uid})")
    if status.st_mode & OTHERS_MAY:
        mode = stat.S_IMODE(status.st_mode)
        raise _refused(path, f"can be reached by other users (mode {mode:04o}); `chmod 700` closes it")
    kind = file_system_of(_mounts(), status.st_dev)
    if SHARED_FILE_SYSTEMS.fullmatch(kind):
        raise _refused(path, f"is on a network file system ({kind}), where changes are not noticed")


def file_system_of(mountinfo: str, device: int) -> str:
    """Return the type of the mounted file system with that device number; empty when it is not listed.

    ``mountinfo`` is the text of ``/proc/self/mountinfo``: the third field of a line is ``major:minor``,
    and the type follows the field ``-``.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if len(fields) > 2 and fields[2] == wanted and source:
            return source.split()[0]
    return ""


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(f"the directory of the file store, {path}, {why}", hint=HINT)
