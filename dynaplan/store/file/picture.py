"""The picture of a store's keys: one file for each key, whose content is the value.

Files are staged before the log gets its record, so that a full disk refuses the write as a whole, and put
in place after it. Something else at a key's place is named once and left alone: the log is the store.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from dynaplan.store.file.log import write_all
from dynaplan.store.file.names import bytes_of, place_of

log = logging.getLogger(__name__)

_DISK_AT_FAULT = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EMFILE))
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITING = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class KeyPicture:
    """The key files under an open directory; ``staging`` is a directory where they are written first."""

    def __init__(self, root: int, staging: int, shown_path: str) -> None:
        self._root = root
        self._staging = staging
        self._path = shown_path
        self._named: set[str] = set()

    def stage(self, values: Mapping[str, str]) -> dict[str, str]:
        """Write the values where nobody looks; return key -> the staged file. Raises OSError on a full
        disk.
        """
        staged = {}
        for number, (key, value) in enumerate(values.items()):
            staged[key] = str(number)
            fd = os.open(staged[key], _WRITING, 0o600, dir_fd=self._staging)
            try:
                write_all(fd, bytes_of(value))
            finally:
                os.close(fd)
            with self._tolerant(key), self._directory_of(key, makes=True):
                pass
        return staged

    def discard(self) -> None:
        """Remove what is staged, as far as possible."""
        for name in os.listdir(self._staging):
            try:
                os.unlink(name, dir_fd=self._staging)
            except OSError as error:
                log.debug("not removed: %s", error)

    def unveil(self, staged: Mapping[str, str], gone: Iterable[str]) -> None:
        """Put the staged files in place, and remove those of keys that are gone. Raises OSError."""
        for key, name in staged.items():
            with self._tolerant(key), self._directory_of(key, makes=True) as (directory, file):
                os.replace(name, file, src_dir_fd=self._staging, dst_dir_fd=directory)
        for key in gone:
            with self._tolerant(key), self._directory_of(key) as (directory, file):
                os.unlink(file, dir_fd=directory)

    def touch(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Set the time of change of these keys' files to now; return the keys without a file."""
        missing = []
        for key in keys:
            try:
                with self._directory_of(key) as (directory, file):
                    os.utime(file, dir_fd=directory, follow_symlinks=False)
            except FileNotFoundError:
                missing.append(key)
            except OSError as error:
                log.debug("%s not touched: %s", key, error)
        return tuple(missing)

    @contextmanager
    def _directory_of(self, key: str, *, makes: bool = False) -> Iterator[tuple[int, str]]:
        """The open directory of a key's file, and the file's name; made if wanted, never behind a link."""
        directories, file = place_of(key)
        fd = self._root
        try:
            for name in directories:
                above, fd = fd, _opened(fd, name, makes)
                if above != self._root:
                    os.close(above)
            yield fd, file
        finally:
            if fd != self._root:
                os.close(fd)

    @contextmanager
    def _tolerant(self, key: str) -> Iterator[None]:
        """Let the disk's errors through; name anything else in the way once."""
        try:
            yield
        except FileNotFoundError:
            pass  # Somebody has removed it by hand.
        except OSError as error:
            if error.errno in _DISK_AT_FAULT:
                raise
            if key not in self._named:
                self._named.add(key)
                log.warning("no file for key %s in %s: something is in its place: %s", key, self._path, error)


def _opened(above: int, name: str, makes: bool) -> int:
    try:
        return os.open(name, _DIRECTORY, dir_fd=above)
    except FileNotFoundError:
        if not makes:
            raise
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        pass
    return os.open(name, _DIRECTORY, dir_fd=above)
