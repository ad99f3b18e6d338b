"""``dynaplan serve --detach``: start it in the background, and return when it is ready or has failed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from dynaplan.cli.main import EXIT_INTERRUPTED
from dynaplan.cli.timing import NOTICE_POLL_S
from dynaplan.fleet.sd_notify import READY
from dynaplan.util import screen
from dynaplan.util.durations import clock
from dynaplan.util.progress import ProgressLine

DETACH = "--detach"

LOG_FILE = "serve.log"
"""The log of the output of ``serve``, in the directory of the logs; ``dynaplan logs serve`` prints it."""

LAST_LINES = 15
"""The number of lines of that log that a failure shows."""

MAX_SOCKET_PATH = 100
"""The bytes that the path of a socket may have, with some to spare (unix(7) has 108)."""

PROGRAM = (sys.executable, "-P", "-m", "dynaplan", "serve")

BOUND_PROGRAM = (
    *(sys.executable, "-P", "-c"),
    "import sys; from dynaplan.process.kernel import die_with_parent; "
    "die_with_parent(int(sys.argv[1])); sys.argv[1] = 'serve'; from dynaplan.__main__ import main; main()",
)
"""The same, killed by the kernel when the process ends that started it, whose pid is its first argument."""


@dataclass(frozen=True)
class Detached:
    """A ``serve`` in the background: its process, its exit code if it has ended already, and its log."""

    pid: int
    code: int | None
    log: Path
    log_from: int

    def last_lines(self) -> list[str]:
        """Return the last lines that ``serve`` has written to its log since it was started."""
        try:
            with self.log.open("rb") as file:
                file.seek(self.log_from)
                return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
        except OSError:
            return []


def serve_detached(arguments: Sequence[str], directory: Path, namespace: str) -> int:
    """Start ``serve`` with these arguments in that directory; return the exit code of the command.

    0 when ``serve`` is ready; when it has ended before, its own code, or 1 instead of 0. Ctrl-C meanwhile
    ends it in order, with ``EXIT_INTERRUPTED``.
    """
    from dynaplan.fleet.deployments import find_deployment
    from dynaplan.fleet.preparation import log_directory

    try:
        started = start_detached(arguments, directory, log_directory(namespace) / LOG_FILE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if started.code is not None:
        lines = "\n  ".join(started.last_lines())
        message = f"it ended with exit code {started.code}. The end of {started.log}:"
        click.echo(f"{screen.error('Error:')} {message}\n  {lines}", err=True)
        return started.code or 1
    found = find_deployment(namespace)
    click.echo(
        f"{screen.good(f'Ready: {found.frontend_url}')}\n"
        f"  serve  pid {started.pid}, its log {started.log}\n"
        f"  watch  dynaplan status {namespace}\n"
        f"  stop   dynaplan stop {namespace}"
    )
    return 0


def start_detached(
    arguments: Sequence[str], directory: Path, log: Path, *, is_bound: bool = False
) -> Detached:
    """Start ``serve`` in a session of its own; return when it is ready or has ended.

    ``is_bound``: it is killed when this process ends, for whatever reason.
    """
    with _notices() as notices, ProgressLine() as line:
        process, log_from = _start(arguments, directory, log, str(notices.getsockname()), is_bound)
        begun_s = time.monotonic()
        try:
            while process.poll() is None:
                if _is_ready(notices):
                    process.returncode = 0  # it goes on without this object, which need not warn of that
                    return Detached(process.pid, None, log, log_from)
                line.show(f"starting, {clock(time.monotonic() - begun_s)}; its log is {log}")
        except BaseException:
            line.erase()
            _end(process)
            raise
        return Detached(process.pid, process.returncode, log, log_from)


def _start(
    arguments: Sequence[str], directory: Path, log: Path, address: str, is_bound: bool
) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``serve``; return its process and the length in bytes that its log had before."""
    program = (*BOUND_PROGRAM, str(os.getpid())) if is_bound else PROGRAM
    own = [each for each in arguments if each != DETACH]
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as output:
        log_from = output.tell()  # before it starts: what it writes moves the position that both share
        process = subprocess.Popen(
            [*program, *own, "--exit-on-failure"],
            cwd=directory,
            env={**os.environ, "NOTIFY_SOCKET": address},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return process, log_from


@contextmanager
def _notices() -> Iterator[socket.socket]:
    """Open the socket at which ``serve`` reports that it is ready, as it would to systemd (sd_notify(3))."""
    usual = tempfile.gettempdir()
    place = usual if len(usual) < MAX_SOCKET_PATH - 30 else "/tmp"
    with (
        tempfile.TemporaryDirectory(prefix="dynaplan-", dir=place) as private,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices,
    ):
        notices.bind(f"{private}/ready")
        notices.settimeout(NOTICE_POLL_S)
        yield notices


def _is_ready(notices: socket.socket) -> bool:
    """Wait a moment for a notification; return whether it is READY."""
    try:
        return READY.encode() in notices.recv(4096).splitlines()
    except TimeoutError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have ``serve`` stop in order, and wait for its end; a second Ctrl-C ends it at once."""
    for number in (signal.SIGTERM, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(number)
        try:
            process.wait()
            return
        except KeyboardInterrupt:
            continue
    process.wait()
