"""Processes of this machine, identified by pid, start time and boot, and ended with their whole session."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.kernel import (
    TRACKERS_TIMEOUT_S,
    command_line,
    descendants,
    is_resource_tracker,
    parents,
)
from dynaplan.process.memory import oom_kills as oom_kills  # part of process.ports.Processes
from dynaplan.process.shim import is_shim

_PROC = Path("/proc")
_WORKER_MARK = "DYNAPLAN_WORKER_NAME"

EXEC_TIMEOUT_S = 0.2
"""Longest wait for the command line of a process that is becoming another program, on a busy machine."""

_EXIT_POLL_S = 0.01
_alone_since_s: dict[tuple[int, int], float] = {}
"""The moment since which only what ends by itself was left of a session, by its leader's pid and start."""


class _Stat(NamedTuple):
    is_gone: bool
    group: int
    session: int
    started_at: int


def _stat(pid: int) -> _Stat | None:
    """Read /proc/<pid>/stat; None without such a process.

    Raises OSError where this process may open no further file: then it cannot know whether the other runs.
    """
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Stat(fields[0] in "ZX", int(fields[2]), int(fields[3]), int(fields[19]))


def identify(pid: int) -> int | None:
    """Return the process's start, in clock ticks since boot; None without a process, or for a zombie.

    Raises OSError where this process may open no further file.
    """
    stat = _stat(pid) if pid > 0 else None
    return None if stat is None or stat.is_gone else stat.started_at


def age_s(started_at: int) -> float:
    """Return the seconds since a process began, by its start in clock ticks since boot."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_at / os.sysconf("SC_CLK_TCK")


@cache
def boot_id() -> str:
    """Return the identifier of this boot of the machine; empty when the kernel does not tell."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def network() -> str:
    """Return the same text for two processes that reach each other at 127.0.0.1, and another for others.

    It joins this boot of the machine and the network namespace, which containers have of their own. Where the
    kernel does not show the namespace, every process of the machine gets the same.
    """
    try:
        inode = os.stat(_PROC / "self/ns/net").st_ino
    except OSError:
        inode = 0
    return f"{boot_id()}/{inode}"


def identity_of(pid: int) -> ProcessIdentity:
    """Return the identity of a running process; raises ProcessLookupError when it does not run."""
    started_at = identify(pid)
    if started_at is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(pid, started_at, boot_id())


def is_alive(process: ProcessIdentity) -> bool:
    """Tell whether this very process still runs, and not a later one with its pid.

    A process of another user that /proc hides (hidepid) cannot be distinguished from its successor: it counts
    as alive.
    """
    if process.boot_id != boot_id() or process.pid <= 0:
        return False
    if _stat(process.pid) is not None:
        return identify(process.pid) == process.started_at
    try:
        os.kill(process.pid, 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return identify(process.pid) == process.started_at


def group_members(group: int) -> tuple[int, ...]:
    return tuple(pid for pid, stat in _running() if stat.group == group)


def session_members(session: int) -> tuple[int, ...]:
    """Return the pids of a session, of all its process groups, without zombies."""
    return tuple(pid for pid, stat in _running() if stat.session == session)


def descendants_of(pid: int) -> list[int]:
    """Return the pids of the processes below a process, without zombies."""
    return descendants(pid, parents())


def command_under(shim: int) -> int:
    """Return the pid of the command that a shim has started; 0 when there is none.

    It is the oldest of its children: later ones are orphans that the shim has adopted.
    """
    ages = {pid: identify(pid) for pid, parent in parents().items() if parent == shim}
    return min(ages, key=lambda pid: (ages[pid] or 0, pid), default=0)


def _running() -> Iterator[tuple[int, _Stat]]:
    for name in os.listdir(_PROC):
        stat = _stat(int(name)) if name.isdigit() else None
        if stat is not None and not stat.is_gone:
            yield int(name), stat


def kill(process: ProcessIdentity) -> None:
    """SIGKILL this very process, and no other of its session; nothing happens when it is gone."""
    if is_alive(process):
        _kill(process.pid)


def kill_group(pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
    """SIGKILL the session that this very process leads, or led; return the pids found in it.

    circus starts every worker in a session of its own; an engine's server leads a process group of its own in
    it. A leader that is there, if only as a zombie, must have started at ``started_at``. When the leader has
    gone, its session lives on in its children, and the kernel does not reuse its number meanwhile. In case
    the number was reused since, only members that started after the leader are killed, and only when one of
    them carries a worker's environment: all members descend from one leader.

    Python's resource trackers are left to end by themselves, and so are shims, which end engines with all
    that these have started, in other sessions too; they count as found. The call blocks for them for
    ``waits_s`` seconds at most and then kills them. With 0 it never blocks, and a later call kills them, once
    they have been alone for ``TRACKERS_TIMEOUT_S``.
    """
    if pid <= 1 or pid in (os.getpgrp(), os.getsid(0)):
        return ()
    leader = _stat(pid)
    members = session_members(pid)
    if leader is None or leader.session < 0:
        members = tuple(each for each in members if _is_younger(each, started_at))
        members = members if any(map(_is_marked, members)) else ()
    elif leader.started_at != started_at or leader.session != pid:
        return ()
    if _spares(pid, started_at, members, waits_s):
        return members
    left = {each: stat for each in members if (stat := _stat(each)) and stat.session == pid}
    parent_of = parents()
    for each in {below for member in left for below in descendants(member, parent_of)} - left.keys():
        _kill(each)  # in a session of its own, below a shim that has had its time
    for group in {stat.group for stat in left.values()}:
        # By groups: a process that is born meanwhile belongs to one of them, and dies with it.
        _kill(-group)
    return members


def kill_but_self_ending(pids: Collection[int]) -> frozenset[int]:
    """SIGKILL these processes but the ones that end by themselves; return the latter.

    They are Python's resource trackers and our shims. A tracker removes the shared memory of killed processes
    and then ends: gigabytes of a vLLM engine, which would stay in /dev/shm until the next boot. A shim ends
    when its parent has, and everything below it, in other sessions too. A stopped one goes on for that.
    Without any of them nothing is killed: that is left to the caller.
    """
    spared = frozenset(pid for pid in pids if _ends_by_itself(pid))
    if spared:
        for pid in pids:
            _kill(pid, signal.SIGCONT if pid in spared else signal.SIGKILL)
    return spared


def _spares(session: int, started_at: int, members: Collection[int], waits_s: float) -> bool:
    """Kill the members but trackers and shims; tell whether there are some with time left to end."""
    spared = kill_but_self_ending(members)
    if spared and waits_s > 0:
        give_up_s = time.monotonic() + waits_s
        while any(identify(pid) for pid in spared) and time.monotonic() < give_up_s:
            time.sleep(_EXIT_POLL_S)
        return False
    key, now_s = (session, started_at), time.monotonic()
    if spared and (
        spared != set(members) or now_s - _alone_since_s.setdefault(key, now_s) < TRACKERS_TIMEOUT_S
    ):
        return True
    _alone_since_s.pop(key, None)
    return False


def _ends_by_itself(pid: int) -> bool:
    line = _command_line(pid)
    return is_resource_tracker(line) or is_shim(line)


def _command_line(pid: int) -> bytes:
    """Return the process's command line, which one that is in the midst of an exec has after a moment."""
    give_up_s = time.monotonic() + EXEC_TIMEOUT_S
    while (line := command_line(pid)) == b"":
        if identify(pid) is None or time.monotonic() >= give_up_s:
            break
        time.sleep(_EXIT_POLL_S)
    return line or b""


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with; empty when it may not be read."""
    try:
        entries = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    named = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in named}


def _is_marked(pid: int) -> bool:
    return _WORKER_MARK in environment_of(pid)


def _is_younger(pid: int, started_at: int) -> bool:
    start = identify(pid)
    return start is not None and start >= started_at


def _kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process, or a group by its negative number, unless it is gone or another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return
