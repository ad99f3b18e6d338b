"""The process that listens on a TCP port of this machine, in words.

Linux shows every listener's user in ``/proc/net/tcp``, and the process only to its own user and to root.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterator
from pathlib import Path

from dynaplan.process.process_table import environment_of

LISTENING = "0A"
"""The state of a listening socket in ``/proc/net/tcp`` (``TCP_LISTEN`` of the kernel's tcp_states.h)."""


def listening_process(port: int) -> str:
    """Return ``pid 123 (nginx)``, ``a process of user alice``, or nothing when nobody is seen to listen.

    A process of dynaplan is named by its ``serve``: ``pid 123 (dynaplan serve, namespace two)``.
    """
    pid = _listening_pid(port)
    if pid:
        return _in_words(pid)
    uid = next(_listening_uids(port), None)
    return "" if uid is None else f"a process of {user_name(uid)}"


def user_name(uid: int) -> str:
    """Return ``user alice``, or ``uid 1001`` for a user without a name."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except (KeyError, OverflowError):
        return f"uid {uid}"


def _listening_pid(port: int) -> int:
    import psutil  # much, for a process that only names users

    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return 0
    listening = (each for each in connections if each.status == psutil.CONN_LISTEN)
    return next((each.pid for each in listening if getattr(each.laddr, "port", 0) == port and each.pid), 0)


def _in_words(pid: int) -> str:
    environment = environment_of(pid)
    serve, namespace = environment.get("DYNAPLAN_PARENT_PID"), environment.get("DYN_NAMESPACE")
    if serve:
        which = f", namespace {namespace}" if namespace else ""
        return f"pid {serve} (dynaplan serve{which})"
    import psutil

    try:
        return f"pid {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"pid {pid}"


def _listening_uids(port: int) -> Iterator[int]:
    """Yield the users of the sockets that listen there.

    Fields of a line: 1 is the local address as ``HEX:HEXPORT``, 3 the state, 7 the user.
    """
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                yield int(fields[7])
