"""One listening socket for all Frontends: a death of one refuses no connection, and nobody else has it."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of
from tests.e2e.test_kills import QUIET, is_whole
from tests.fakes.polling import PATIENCE_S, wait_until

Deploy = Callable[..., Deployment]

REQUEST = b"GET /live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class Callers:
    """A client that opens a connection every 50 ms, each with a request, and never a second time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._end = threading.Event()
        self._connections: list[tuple[float, socket.socket]] = []
        self.refused: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Callers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for _, connection in self._connections:
            connection.close()

    def _run(self) -> None:
        while not self._end.wait(0.05):
            try:
                connection = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
                self._connections.append((time.monotonic(), connection))
                connection.sendall(REQUEST)
            except OSError as error:
                self.refused.append(repr(error))

    @property
    def number(self) -> int:
        return len(self._connections)

    def answers(self, since_s: float) -> list[bytes]:
        """The first lines of the answers to the connections opened since then."""
        self._end.set()
        self._thread.join()
        answers = []
        for begun_s, connection in self._connections:
            if begun_s > since_s:
                with suppress(ConnectionError):
                    answers.append(connection.recv(1000).partition(b"\r\n")[0])
        return answers


def listener_of(deployment: Deployment) -> tuple[int, str]:
    """The public port, and the name that /proc gives the socket that listens there."""
    port = int(deployment.url.rpartition(":")[2])
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    [inode] = {row[9] for row in rows if int(row[1].partition(":")[2], 16) == port and row[3] == "0A"}
    return port, f"socket:[{inode}]"


def holders(deployment: Deployment, name: str) -> set[int]:
    """The processes of the deployment that have this socket."""
    found = set()
    assert deployment.process
    for process in [psutil.Process(deployment.process.pid), *deployment.children()]:
        for descriptor in os.listdir(f"/proc/{process.pid}/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/fd/{descriptor}") == name:
                    found.add(process.pid)
    return found


def test_a_killed_frontend_lets_new_connections_wait_and_refuses_none(deploy: Deploy) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    old = deployment.pid_of("dynamo_Frontend")
    port, _ = listener_of(deployment)
    with Callers(port) as callers:
        wait_until(lambda: callers.number > 4)
        os.kill(old, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(old))
        killed_s = time.monotonic()
        wait_until(lambda: is_whole(deployment) and deployment.pid_of("dynamo_Frontend") != old)
        count = callers.number
        wait_until(lambda: callers.number > count + 4)
        answers = callers.answers(killed_s)
    assert callers.refused == []
    assert len(answers) > 5
    assert set(answers) == {b"HTTP/1.1 200 OK"}


@pytest.mark.slow
def test_only_serve_its_supervisor_and_the_frontends_have_the_listening_socket(deploy: Deploy) -> None:
    deployment = deploy("graphs.disagg:Frontend", "disagg.yaml", "--Frontend.ServiceArgs.workers=2", *QUIET)
    assert deployment.process
    frontends = {worker["pid"] for worker in deployment.workers("Frontend").values()}
    port, name = listener_of(deployment)
    assert len(frontends) == 2
    serve = serve_of(deployment)
    assert serve
    assert holders(deployment, name) == {deployment.process.pid, serve.pid, *frontends}
    assert deployment.stop() == 0
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
