"""A terminal or a pipe that nobody reads: held by Ctrl-S, a pager that waits, a full pipe. All goes on."""

from __future__ import annotations

import os
import pty
import signal
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of
from tests.e2e.traces import files_of
from tests.fakes.polling import wait_until


def held_terminal() -> tuple[int, int]:
    """Return a terminal's two ends, with nothing read and held as by Ctrl-S."""
    master, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)
    return master, terminal


def full_pipe() -> tuple[int, int]:
    """Return a pipe's two ends, with no room left."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    return reader, writer


@pytest.fixture(params=[held_terminal, full_pipe], ids=lambda ends: ends.__name__.replace("_", " "))
def unread(request: pytest.FixtureRequest) -> Iterator[int]:
    reader, writer = request.param()
    yield writer
    os.close(writer)
    os.close(reader)


def kill_and_await_another(pid_of: Callable[[], int]) -> None:
    """Kill a process, and wait until another is there in its place."""
    before = pid_of()
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: pid_of() not in (0, before))


@pytest.mark.slow
def test_killed_workers_and_a_killed_serve_come_back_and_ctrl_c_ends_it(tmp_path: Path, unread: int) -> None:
    deployment = Deployment(tmp_path)
    deployment.prints_to = unread
    try:
        deployment.start()
        for name in deployment.workers():
            kill_and_await_another(partial(deployment.pid_of, name))
        deployment.wait_ready()
        kill_and_await_another(lambda: pid_of_serve(deployment))
        [name] = deployment.workers("VllmWorker")
        kill_and_await_another(partial(deployment.pid_of, name))
        deployment.wait_ready()
        assert deployment.stop() == 0
        assert files_of(deployment) == []
    finally:
        deployment.close()


def pid_of_serve(deployment: Deployment) -> int:
    """Return the pid of ``serve``; 0 while it is away."""
    serve = serve_of(deployment)
    return serve.pid if serve else 0
