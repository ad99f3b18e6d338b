"""Start a program so that it cannot outlive the process that started it.

Linux only. There are two ways, for the two kinds of child:

- A Python process of ours calls ``die_with_parent`` first of all.
- Any other program is started by the command line that ``guarded`` returns. It runs this file as a script:
  ``python -I -S .../guard.py --parent PID [--log FILE] [--without PREFIX]... -- COMMAND [ARG]...``.
  The script calls ``die_with_parent``, lets SIGTERM end it, appends stdout and stderr to the file (mode 0600;
  a file that has grown past 10 MiB is first moved to ``FILE.1``), drops the environment variables that begin
  with a PREFIX, and becomes the command. It exits with 1 when the parent is gone already, 78 when the command
  cannot be run.

A ``preexec_fn`` would need no script, but Python code that runs between fork and exec may deadlock.
The script imports neither ``argparse`` nor ``dynaplan``, so it adds about 15 ms to the start of a program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of ``prctl``, from ``linux/prctl.h``: the signal that a process gets when its parent ends, and that
it becomes the parent of orphans below it."""

EXIT_NEVER = 78
"""The same as ``dynaplan.graph.lifecycle.EXIT_NEVER``, which this file must not import."""

MAX_LOG_BYTES = 10 * 1024 * 1024


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends; exit now if that has happened.

    ``parent_pid`` is the pid that the parent had when it started this process. The kernel ties the signal to
    the parent's *thread* that started this process, so a parent must start its children from a thread that
    lives as long as itself. The request survives exec and is not inherited by children.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"the parent, process {parent_pid}, is gone")


def adopt_orphans() -> None:
    """Adopt descendants whose parent dies, from now on, so that none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def guarded(
    command: Sequence[str],
    parent_pid: int,
    *,
    log: str | os.PathLike[str] | None = None,
    without: Sequence[str] = (),
) -> list[str]:
    """Return the command line that runs ``command`` under this guard.

    ``log`` is the file for its output, by default this process's own output. ``without`` are the prefixes of
    environment variables to drop.
    """
    options = ["--parent", str(parent_pid), *(["--log", os.fspath(log)] if log is not None else [])]
    options += [word for prefix in without for word in ("--without", prefix)]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *options, "--", *command]


def main(arguments: list[str]) -> int:
    """Become the command; return an exit code only when that failed."""
    split = arguments.index("--")
    options = list(zip(arguments[:split:2], arguments[1:split:2], strict=True))
    command = arguments[split + 1 :]
    named = dict(options)
    die_with_parent(int(named["--parent"]))
    # One that ignored SIGTERM, as after a shell's `trap '' TERM`, would ignore it in the command too.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if "--log" in named:
        _send_output_to(named["--log"])
    drop = tuple(value for name, value in options if name == "--without")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(drop)}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return EXIT_NEVER


def _send_output_to(log: str) -> None:
    try:
        if os.path.getsize(log) > MAX_LOG_BYTES:
            os.replace(log, log + ".1")
    except FileNotFoundError:
        pass
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
