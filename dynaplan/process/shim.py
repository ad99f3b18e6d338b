"""Run a program so that nothing it has started stays behind, neither after its own end nor after ours.

Linux only. A parent-death signal reaches one process: the children of that one go on, with their GPU, as
vLLM's EngineCore does. So a shim stands between us and the program: the program's parent, and the subreaper
of whatever it starts, in any process group and any session. ``shim_command`` returns the command line that
runs ``main`` here with the words ``--parent PID -- COMMAND [ARG]...``.

- When the process PID ends, or on ``END_SIGNAL``, the shim kills all its descendants.
- When the command ends, it kills what the command has left.
- SIGTERM, SIGINT, SIGHUP and SIGQUIT it passes on to the command.
- When nothing is below it any more it ends as the command did: with its exit code, or by its signal. The exit
  code is 1 when PID was gone already, 78 when the command cannot be run.
- Killed itself, it takes the command along, but not the command's children.

Python's resource trackers among them have ``TRACKERS_TIMEOUT_S`` to end by themselves.

It runs in two steps. Asking the kernel for all this takes ``ctypes``, and a command line that names
the command. A process keeps what it asked for, its children and its blocked signals when it becomes another
program, so it becomes itself once more, with neither: ``--child PID``. That leaves 3 MiB,
most of it Python's own, no second process with the command's words in its command line, and none of the
command's variables but the one by which a worker's processes are recognised.
"""

from __future__ import annotations

# Not ``signal``: its enumerations cost a process that only waits another MiB. Nor ``typing``.
import _signal  # type: ignore[import-not-found]
import os
import sys
import time

from dynaplan.process.kernel import (
    EXIT_CANNOT_START,
    TRACKERS_TIMEOUT_S,
    adopt_orphans,
    command_line,
    descendants,
    is_resource_tracker,
    isolated_command,
    parents,
    shim_arguments,
    signal_at_parents_end,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

END_SIGNAL: int = _signal.SIGUSR1
"""The kernel sends it when the parent ends, and the parent to have everything killed at once."""

PASSED_ON = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGHUP, _signal.SIGQUIT)
AWAITED = (*PASSED_ON, _signal.SIGCHLD, END_SIGNAL)

KEPT_VARIABLE = "DYNAPLAN_WORKER_NAME"

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.005, 0.5
"""Time between two checks of processes that were killed: a GPU's memory may take seconds to be freed."""


def shim_command(command: Sequence[str], parent_pid: int) -> list[str]:
    """Return the command line that runs ``command`` under a shim of that parent."""
    return isolated_command("shim", "--parent", str(parent_pid), "--", *command)


def is_shim(line: bytes) -> bool:
    """Tell whether a process with this line of ``/proc/PID/cmdline`` is a shim whose command runs."""
    return (shim_arguments(line) or [])[:1] == [b"--child"]


def main(arguments: list[str]) -> int:
    """Start the command under a shim, or, with ``--child``, supervise it as the shim; return an exit code."""
    if arguments[0] == "--child":
        return _supervise(int(arguments[1]))
    split = arguments.index("--")
    return _start(int(arguments[1]), arguments[split + 1 :])


def _start(parent_pid: int, command: list[str]) -> int:
    mask = _signal.pthread_sigmask(_signal.SIG_BLOCK, AWAITED)
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)  # ignored, as by some parents, it would not come
    adopt_orphans()
    if not signal_at_parents_end(END_SIGNAL, parent_pid):
        print(f"the parent, process {parent_pid}, is gone", file=sys.stderr)
        return 1
    own_pid = os.getpid()
    child = os.fork()
    if child == 0:
        os._exit(_become(command, own_pid, mask))
    kept = {name: value for name, value in os.environ.items() if name == KEPT_VARIABLE}
    try:
        os.execve(sys.executable, isolated_command("shim", "--child", str(child)), kept)
    except OSError:  # this Python has been removed meanwhile: it is larger, and does as well
        return _supervise(child)


def _become(command: list[str], shim_pid: int, mask: Iterable[int]) -> int:
    """Become the command, which dies with its shim; return an exit code only when that failed."""
    if not signal_at_parents_end(_signal.SIGKILL, shim_pid):
        return 1
    # One that ignored SIGTERM, as after a shell's `trap '' TERM`, would ignore it in the command too.
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, set(mask) - {_signal.SIGTERM})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return EXIT_CANNOT_START


def _supervise(child: int) -> int:
    """Wait until the command exits or our parent dies, kill all descendants, and end like the command."""
    status, has_children = None, True
    while status is None and has_children:
        number = _signal.sigwaitinfo(AWAITED).si_signo
        if number == END_SIGNAL:
            break
        if number in PASSED_ON:
            os.kill(child, number)  # not reaped yet, so it is still this one
        else:
            status, has_children = _reap(child)
    return _end_like(_end_all(child, status))


def _reap(child: int) -> tuple[int | None, bool]:
    """Reap what has ended; return the child's status, if it was among them, and whether more are there."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == child:
            status = ended


def _end_all(child: int, status: int | None) -> int | None:
    """Kill all descendants until none is left; return the child's status."""
    begun_s, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        ended, has_children = _reap(child)
        status = status if ended is None else ended
        if not has_children:
            return status
        spares = time.monotonic() - begun_s < TRACKERS_TIMEOUT_S
        for pid in descendants(os.getpid(), parents()):
            if not (spares and is_resource_tracker(command_line(pid))):
                try:
                    os.kill(pid, _signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        _signal.sigtimedwait(AWAITED, pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


def _end_like(status: int | None) -> int:
    """Return the command's exit code; die by its signal, without a second core file, if that ended it."""
    code = 1 if status is None else os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(-code, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, {-code})
    os.kill(os.getpid(), -code)
    return 128 - code
