"""Faults that only the kernel can make in another process: a connection that is cut, no descriptor left."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

PIDFD_GETFD = 438
"""The number of the system call, the same on every architecture."""


def shut_down_a_connection(pid: int, dice: random.Random) -> str:
    """Shut one TCP connection of that process down, both ways; return its ends, empty when there is none.

    The process sees what it sees when a network drops the connection: the end of the stream, and no way to
    write. It takes the rights to trace the process.
    """
    try:
        connections = [
            each
            for each in psutil.Process(pid).net_connections("tcp")
            if each.status == psutil.CONN_ESTABLISHED and each.fd >= 0
        ]
    except psutil.Error:
        return ""
    if not connections:
        return ""
    chosen = dice.choice(sorted(connections, key=lambda each: each.fd))
    with suppress(OSError):
        pidfd = os.pidfd_open(pid)
        copy = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, pidfd, chosen.fd, 0)
        os.close(pidfd)
        if copy < 0:
            return ""
        with socket.socket(fileno=copy) as held:
            held.shutdown(socket.SHUT_RDWR)
        return f"{chosen.laddr.port}-{chosen.raddr.port}"
    return ""


@contextmanager
def descriptors_exhausted(pid: int) -> Iterator[None]:
    """Let that process open nothing more, until the end of the context."""
    process = psutil.Process(pid)
    soft, hard = process.rlimit(resource.RLIMIT_NOFILE)
    process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds(), hard))
    try:
        yield
    finally:
        with suppress(psutil.Error):
            process.rlimit(resource.RLIMIT_NOFILE, (soft, hard))
