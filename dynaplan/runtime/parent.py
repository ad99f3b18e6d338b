"""No process outlives the one that supervises it."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends; ends it now if that has happened.

    ``parent_pid`` is the pid that the parent had when it started this process. Linux only. The kernel
    ties the signal to the parent's *thread* that started this process, so a supervisor must start its
    children from a thread that lives as long as itself. Survives exec, is not inherited by children.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    if os.getppid() != parent_pid:
        raise SystemExit(f"the parent, process {parent_pid}, is gone")
