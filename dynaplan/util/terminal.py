"""Lines for a terminal, a pipe or a journal that may have stopped reading.

A terminal that is held (Ctrl-S), a pager that waits and a pipe that nobody reads take no more when their
buffer is full, and a write to them waits for as long as that lasts. What watches over others must not wait:
it drops the line instead. To make the descriptor itself non-blocking would make it so for every process that
shares it, the user's shell among them.
"""

from __future__ import annotations

import os
import select

_REOPEN_FLAGS = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


def try_write_line(line: str, descriptor: int = 1) -> bool:
    """Write a line; tell whether it was taken, which may have been in part."""
    return try_write(f"{line}\n", descriptor)


def try_write(text: str, descriptor: int = 1) -> bool:
    """Write a text of at most a page (4096 bytes) to a descriptor, unless that would wait for a reader.

    Tells whether it was taken, of which a terminal may have taken a part; False, too, if there is none any
    more.
    """
    own = _reopen(descriptor)
    try:
        if own is None and not _has_room(descriptor):
            return False
        os.write(descriptor if own is None else own, text.encode(errors="replace"))
    except OSError:
        return False
    finally:
        if own is not None:
            os.close(own)
    return True


def _reopen(descriptor: int) -> int | None:
    """Open the terminal once more, for this process alone; None if it is none, or another user's (su).

    A terminal says that it has room when there is some, which may be less than a line.
    """
    try:
        return os.open(f"/proc/self/fd/{descriptor}", _REOPEN_FLAGS) if os.isatty(descriptor) else None
    except OSError:
        return None


def _has_room(descriptor: int) -> bool:
    """Tell whether a pipe has a page free, or a socket half its buffer; a file always has room."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(events & select.POLLOUT for _, events in poll.poll(0))
