"""Notices of changes in a directory, from the kernel (inotify).

Python's standard library has no door to inotify. Two calls of libc and a read are all that is needed
here: which change it was does not matter, since the log tells.
"""

from __future__ import annotations

import ctypes
import os

_IN_MODIFY, _IN_MOVED_TO, _IN_CREATE = 0x2, 0x80, 0x100
_IN_DELETE, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x200, 0x400, 0x800
_IN_ONLYDIR, _IN_DONT_FOLLOW = 0x1000000, 0x2000000
_LOG_CHANGES = _IN_MODIFY | _IN_MOVED_TO | _IN_CREATE | _IN_DELETE | _IN_DELETE_SELF | _IN_MOVE_SELF
_MOVES = _IN_MOVE_SELF | _IN_DELETE_SELF
_READ_BYTES = 65536


class FileNotices:
    """An inotify descriptor, to be given to an event loop. Raises OSError when the kernel has none left."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def follow(self, root: str, journal: str) -> None:
        """Tell of changes of files in the journal's directory, and of the root's moving away. Raises
        OSError.
        """
        for path, mask in ((journal, _LOG_CHANGES), (root, _MOVES)):
            flags = mask | _IN_ONLYDIR | _IN_DONT_FOLLOW
            self._checked(self._libc.inotify_add_watch(self.fd, os.fsencode(path), flags))

    def drain(self) -> None:
        """Take the notices that have come."""
        try:
            while len(os.read(self.fd, _READ_BYTES)) > _READ_BYTES // 2:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the inotify descriptor; it tells of no change any more."""
        os.close(self.fd)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
