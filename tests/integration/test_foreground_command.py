"""A command in the foreground: its exit code, its signals, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dynaplan.process import kernel
from dynaplan.process.foreground_command import ForegroundCommand
from tests.fakes.polling import eventually


@pytest.fixture(autouse=True)
def has_a_terminal() -> Iterator[None]:
    """Below nohup the end of the terminal is ignored, here and in what is started."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def adopts_no_orphans_afterwards() -> Iterator[None]:
    """A command's orphans become children of this process, which reaps none of other tests."""
    yield
    kernel._prctl(kernel.PR_SET_CHILD_SUBREAPER, 0)


def shell(script: str) -> ForegroundCommand:
    return ForegroundCommand(["sh", "-c", script], dict(os.environ))


@pytest.mark.parametrize(("script", "code"), [("exit 3", 3), ("kill -TERM $$", 143), ("true", 0)])
async def test_its_exit_code_is_that_of_a_shell(script: str, code: int) -> None:
    assert await shell(script).wait(1.0) == code


async def test_what_it_has_started_in_another_session_is_killed_with_its_end(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    assert await shell(f"setsid sleep 300 & echo $! > {pid}; sleep 0.2").wait(1.0) == 0
    assert not psutil.pid_exists(int(pid.read_text()))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
async def test_signals_reach_the_command(tmp_path: Path, number: signal.Signals) -> None:
    ready = tmp_path / "ready"
    program = shell(f"trap 'exit 9' {number.name[3:]}; touch {ready}; while :; do sleep 0.05; done")
    waiting = asyncio.create_task(program.wait(1.0))
    await eventually(ready.exists)
    os.kill(os.getpid(), number)
    assert await waiting == 9


async def test_one_that_ignores_the_end_of_the_terminal_is_killed_after_its_time(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = shell(f"trap '' HUP; touch {ready}; while :; do sleep 0.05; done")
    waiting = asyncio.create_task(program.wait(0.1))
    await eventually(ready.exists)
    os.kill(os.getpid(), signal.SIGHUP)
    assert await waiting == 128 + signal.SIGKILL
