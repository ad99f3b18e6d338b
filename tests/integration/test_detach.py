"""``serve --detach``: it returns when ``serve`` is ready, or has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import detach
from dynaplan.cli.detach import serve_detached, start_detached
from dynaplan.fleet import deployments
from tests.fakes.polling import wait_until

READY = """
import os, socket, sys, time
print("args", *sys.argv[1:], os.getcwd(), flush=True)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
    notices.sendto(b"WATCHDOG=1", os.environ["NOTIFY_SOCKET"])
    notices.sendto(b"READY=1\\nSTATUS=serves", os.environ["NOTIFY_SOCKET"])
time.sleep(600)
"""
FAILING = 'import sys; print("why it failed", flush=True); sys.exit(78)'
SLOW = 'import time; print("slow", flush=True); time.sleep(600)'


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have a script in the place of ``dynaplan serve``."""

    def run(script: str) -> None:
        monkeypatch.setattr(detach, "PROGRAM", (sys.executable, "-c", script))

    return run


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_it_returns_when_serve_says_that_it_is_ready(program: Any, tmp_path: Path) -> None:
    program(READY)
    started = start_detached(["g", "--detach", "-f", "x"], tmp_path, tmp_path / "serve.log")
    try:
        assert started.code is None
        assert os.getsid(started.pid) == started.pid
        assert started.last_lines() == [f"args g -f x --exit-on-failure {tmp_path}"]
    finally:
        end(started.pid)


def test_a_serve_that_fails_is_told_with_its_exit_code_and_its_last_lines_only(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(FAILING)
    monkeypatch.setenv("DYN_CIRCUS_LOG_DIR", str(tmp_path))
    (tmp_path / "ns").mkdir()
    (tmp_path / "ns" / "serve.log").write_text("of yesterday\n")
    assert serve_detached([], tmp_path, "ns") == 78
    said = capsys.readouterr().err
    assert "exit code 78" in said
    assert "why it failed" in said
    assert "of yesterday" not in said


def test_what_serve_has_written_before_popen_returns_is_in_the_last_lines(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(FAILING)
    log = tmp_path / "serve.log"
    log.write_text("of yesterday\n")

    class PopenThatWaitsForOutput(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            wait_until(lambda: "why it failed" in log.read_text())

    monkeypatch.setattr(subprocess, "Popen", PopenThatWaitsForOutput)
    assert start_detached([], tmp_path, log).last_lines() == ["why it failed"]


def test_a_ready_serve_is_told_with_its_address_and_how_to_end_it(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program(READY)
    monkeypatch.setenv("DYN_CIRCUS_LOG_DIR", str(tmp_path))
    found = SimpleNamespace(frontend_url="http://x:1")
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: found)
    assert serve_detached([], tmp_path, "ns") == 0
    said = capsys.readouterr().out
    end(int(said.partition("pid ")[2].partition(",")[0]))
    assert "Ready: http://x:1" in said
    assert "dynaplan stop ns" in said


def test_ctrl_c_while_it_starts_ends_it(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(SLOW)
    monkeypatch.setenv("DYN_CIRCUS_LOG_DIR", str(tmp_path))
    pids: list[int] = []
    start = detach._start

    def started(*arguments: Any) -> Any:
        process, length = start(*arguments)
        pids.append(process.pid)
        return process, length

    def interrupted(notices: Any) -> bool:
        wait_until(lambda: (tmp_path / "ns" / "serve.log").read_text() == "slow\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(detach, "_start", started)
    monkeypatch.setattr(detach, "_is_ready", interrupted)
    assert serve_detached([], tmp_path, "ns") == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
