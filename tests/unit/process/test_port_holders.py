"""Who listens on a port, as far as this user may know."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dynaplan.process import port_holders
from dynaplan.process.port_holders import listening_process, user_name
from tests.fakes.polling import wait_until


def test_a_listening_process_of_ours_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listening_process(port) == f"pid {os.getpid()} ({psutil.Process().name()})"
    assert listening_process(port) == ""


def test_a_process_of_dynaplan_is_named_by_its_serve() -> None:
    script = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
    script += "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    environment = {**os.environ, "DYNAPLAN_PARENT_PID": "77", "DYN_NAMESPACE": "two"}
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout
        port = int(child.stdout.readline())
        assert listening_process(port) == "pid 77 (dynaplan serve, namespace two)"


def test_a_process_that_may_not_be_looked_at_is_told_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user's listener looks like: its socket is in /proc/net/tcp, its process is not told."""
    monkeypatch.setattr(psutil, "net_connections", lambda kind: [])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wait_until(lambda: f"{port:04X}" in Path("/proc/net/tcp").read_text(), 5)
        assert listening_process(port) == f"a process of {user_name(os.getuid())}"


def test_a_process_that_ends_meanwhile_is_a_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_holders, "_listening_pid", lambda port: 2**22 + 1)
    assert listening_process(1) == f"pid {2**22 + 1}"


def test_where_nothing_may_be_read_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", denied)
    assert listening_process(1) == ""
    assert user_name(2**31) == f"uid {2**31}"
