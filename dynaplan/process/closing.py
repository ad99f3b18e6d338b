"""The last things that a holder does by itself: ending what is left, removing files.

It may run for months, and its files may be gone by then, as after an upgrade: nothing is imported any more
when it comes to its end.
"""

from __future__ import annotations

# Not ``signal``: it would double a process that only waits.
import _signal  # type: ignore[import-not-found]
import os
import time

from dynaplan.process.shim import descendants, parents

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

AFTER_KILL_S, SPARED_S = 5.0, 3.0
"""Time to wait for killed processes, and the first part of it, in which those are spared that clean up."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
"""Time between two looks at processes that were killed."""


def cleans_up(pid: int) -> bool:
    """Tell whether it is a shim or a resource tracker, which end by themselves when the others are gone.

    One without a command line, in the midst of an exec, may become such a one.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            line = file.read()
    except OSError:
        return False
    return not line or b"/process/shim.py" in line or b"multiprocessing.resource_tracker" in line


def end_everything_below() -> None:
    """Kill whatever is below this process, until nothing is, or for AFTER_KILL_S seconds."""
    begun_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while (since_s := time.monotonic() - begun_s) < AFTER_KILL_S:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in descendants(os.getpid(), parents()):
            if since_s > SPARED_S or not cleans_up(pid):
                try:
                    os.kill(pid, _signal.SIGKILL)
                except OSError:
                    continue
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def remove(paths: Iterable[str]) -> None:
    """Remove files, links and directories with all that is in them, in that order.

    A path with a slash at its end is a directory that goes if it is empty. What cannot be removed stays.
    """
    for path in paths:
        if path.endswith("/"):
            _try(os.rmdir, path)
        elif os.path.isdir(path) and not os.path.islink(path):
            for directory, directories, files in os.walk(path, topdown=False):
                for name in (*files, *directories):
                    inner = os.path.join(directory, name)
                    is_directory = name in directories and not os.path.islink(inner)
                    _try(os.rmdir if is_directory else os.unlink, inner)
            _try(os.rmdir, path)
        elif os.path.lexists(path):
            _try(os.unlink, path)


def _try(removal: Callable[[str], None], path: str) -> None:
    try:
        removal(path)
    except OSError:
        return
