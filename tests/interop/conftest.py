"""Reaching the independent client ``etcd3``, and an etcd that independent programs can reach."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from dynaplan.fleet.servers import find_etcd
from dynaplan.process.guard import guard_command
from dynaplan.util.sockets import free_port

DYNAMO_VARIABLE = "DYNAPLAN_DYNAMO_EVENTS_PYTHON"


@pytest.fixture
def python() -> str:
    """The Python in which Dynamo's runtime 1.6.1 is installed."""
    path = os.environ.get(DYNAMO_VARIABLE)
    if not path:
        pytest.skip(f"{DYNAMO_VARIABLE} names no Python with ai-dynamo-runtime (tox -e interop makes one)")
    return path


class Etcd3:
    """etcd3 in a process of its own; see ``etcd3_client.Calls`` for what can be called."""

    def __init__(self, python: str, endpoint: str) -> None:
        # It joins host and port with a colon to the target of gRPC: unix:{path}, and the path has a colon.
        host, _, port = endpoint.replace("unix://", "unix:").rpartition(":")
        command = [python, str(Path(__file__).with_name("etcd3_client.py")), host, port]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call it and wait for the result."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the client ended with {self._process.wait(5)}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def connect_etcd3() -> Iterator[Callable[[str], Etcd3]]:
    """Connect the client to an endpoint as in ``ETCD_ENDPOINTS``; skipped where there is no etcd3."""
    python = os.environ.get("DYNAPLAN_ETCD3_PYTHON")
    if not python:
        pytest.skip("DYNAPLAN_ETCD3_PYTHON names no Python with etcd3 0.12 (tox -e interop makes one)")
    clients: list[Etcd3] = []

    def connect(endpoint: str) -> Etcd3:
        clients.append(Etcd3(python, endpoint))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


@pytest.fixture
def tcp_etcd(tmp_path: Path) -> Iterator[str]:
    """An etcd that the original can reach: it knows no unix sockets."""
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    options = {
        "data-dir": str(tmp_path / "etcd"),
        "listen-client-urls": client,
        "advertise-client-urls": client,
        "listen-peer-urls": peer,
        "initial-advertise-peer-urls": peer,
        "initial-cluster": f"default={peer}",
        "log-level": "error",
    }
    command = [find_etcd()[0], *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(guard_command(command, os.getpid(), without=("ETCD_",)))
    yield client
    process.kill()
    process.wait()


class Programs:
    """Programs of others in the background, with their output in one file."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._running: list[subprocess.Popen[bytes]] = []

    @property
    def text(self) -> str:
        """The end of what all have said."""
        return self._log.read_text(errors="replace")[-8000:] if self._log.exists() else ""

    def start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start one more; it ends with the test."""
        with self._log.open("ab") as output:
            self._running.append(
                subprocess.Popen(
                    guard_command(command, os.getpid()),
                    env=dict(environment),
                    cwd=self._log.parent,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
        return self._running[-1]

    def close(self) -> None:
        """End all, the newest first."""
        for each in reversed(self._running):
            each.kill()
            each.wait(10)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path / "programs.log")
    yield made
    made.close()
