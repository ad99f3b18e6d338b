"""Start a program so that it cannot outlive the process that started it.

Linux only. There are two ways, for the two kinds of child:

- A Python process of ours calls ``kernel.die_with_parent`` first of all.
- Any other program is started by the command line that ``guard_command`` returns. It runs ``main`` here,
  with ``--parent PID [--log FILE] [--without PREFIX]... -- COMMAND [ARG]...``: die with the parent, let
  SIGTERM end it, append stdout and stderr to the file (mode 0600; a file that has grown past 10 MiB is first
  moved to ``FILE.1``), drop the environment variables that begin with a PREFIX, and become the command. The
  exit code is 1 when the parent is gone already, 78 when the command cannot be run.

A ``preexec_fn`` would need no process between, but Python code that runs between fork and exec may deadlock.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from dynaplan.process.kernel import EXIT_CANNOT_START, die_with_parent, isolated_command

MAX_LOG_BYTES = 10 * 1024 * 1024


def guard_command(
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
    return isolated_command("guard", *options, "--", *command)


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
        return EXIT_CANNOT_START


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
