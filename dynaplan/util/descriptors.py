"""File descriptors: as many as the machine allows, and words for when they have run out."""

from __future__ import annotations

import errno
import resource

MAX_OPEN_FILES = 1_048_576
"""The largest limit that is asked for: programs that look through all of them stay quick."""

_EXHAUSTED = (errno.EMFILE, errno.ENFILE)


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard one, for its children too; return it.

    A shell's usual soft limit of 1024 is reached by 500 streams: each takes two descriptors of a frontend.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted


def descriptor_limit() -> int:
    """Return the number of files that this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def is_exhausted(error: BaseException) -> bool:
    """Tell whether an operation failed because no file descriptor was left, here or on the machine."""
    return isinstance(error, OSError) and error.errno in _EXHAUSTED
