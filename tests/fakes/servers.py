"""Real etcd and NATS servers for tests, started just as ``dynaplan serve`` starts its own.

A plugin of pytest: a test asks for ``etcd`` or ``nats`` and has a server of its own. ``Server.environment``
holds the variables that the server's clients read.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynaplan.fleet.servers import ServerSpec, embedded_etcd, embedded_nats
from dynaplan.process.guard import guard_command
from tests.fakes.polling import wait_until
from tests.fakes.processes import freeze


class Server:
    """One server process that a test may kill, freeze and start again."""

    def __init__(self, spec: ServerSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        self.environment = spec.environment
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self, timeout_s: float = 15.0) -> float:
        """Start it and wait, without yielding to a loop, until it answers; how long that took, in seconds."""
        begun_s = time.monotonic()
        self.spawn()
        # In a thread of its own: the calling one may be running a loop.
        with ThreadPoolExecutor(1) as pool:
            wait_until(lambda: pool.submit(asyncio.run, _is_ready(self.spec)).result(), timeout_s, 0.01)
        return time.monotonic() - begun_s

    async def start_again(self, timeout_s: float = 15.0) -> float:
        """``start``, while the test's event loop goes on."""
        return await asyncio.to_thread(self.start, timeout_s)

    def spawn(self) -> None:
        """Start it without waiting."""
        command = guard_command(self.spec.cmd, os.getpid(), log=self.log, without=self.spec.without)
        self.process = subprocess.Popen(command, cwd=self.spec.working_dir, start_new_session=True)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """SIGTERM, and wait until it is gone."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, nothing answers."""
        freeze(self.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def wipe(self) -> None:
        """Delete its data; for a server that is not running."""
        for name in ("data", "jetstream"):
            shutil.rmtree(self.spec.working_dir / name, ignore_errors=True)


async def _is_ready(spec: ServerSpec) -> bool:
    return await spec.is_ready()


def start_etcd(runtime_dir: Path) -> Server:
    """A running embedded etcd with its data below ``runtime_dir``."""
    return _started(embedded_etcd(runtime_dir), runtime_dir)


def start_nats(runtime_dir: Path) -> Server:
    """A running embedded NATS server with its data below ``runtime_dir``."""
    return _started(embedded_nats(runtime_dir), runtime_dir)


def _started(spec: ServerSpec, runtime_dir: Path) -> Server:
    server = Server(spec, runtime_dir / f"{spec.name}.log")
    try:
        server.start()
    except BaseException:
        server.kill()
        raise
    return server


@contextmanager
def short_directory() -> Iterator[Path]:
    """A private directory whose path is short enough for unix sockets, however long TMPDIR is."""
    with tempfile.TemporaryDirectory(prefix="dp-", dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory


@pytest.fixture
def etcd(runtime_dir: Path) -> Iterator[Server]:
    """A real etcd; ``etcd.environment`` holds ETCD_ENDPOINTS."""
    server = start_etcd(runtime_dir)
    yield server
    server.kill()


@pytest.fixture
def nats(runtime_dir: Path) -> Iterator[Server]:
    """A real NATS server; ``nats.environment`` holds NATS_SERVER and NATS_AUTH_TOKEN."""
    server = start_nats(runtime_dir)
    yield server
    server.kill()
