"""``dynaplan serve`` as a user starts it: the installed command, its own directories, an ephemeral port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from tests.fakes.polling import PATIENCE_S, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "meta-llama/Llama-3.1-8B-Instruct"

FORK_SERVER = "dynaplan.process.fork_server"

EXECUTED = {"DYNAPLAN_FORK_WORKERS": "0"}
"""The environment of a deployment whose workers show their own command line and environment in ``/proc``."""


class Deployment:
    """One running ``dynaplan serve``; ``close`` makes sure that nothing of it is left."""

    def __init__(
        self,
        directory: Path,
        graph: str = "graphs.disagg:Frontend",
        config: str = "disagg.yaml",
        *options: str,
        namespace: str = "dynamo",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.namespace = namespace
        # Unix socket paths are limited to 107 characters; pytest's directories are long.
        self.runtime_base = Path(tempfile.mkdtemp(prefix="dp-", dir="/tmp"))
        self.environment = {
            **os.environ,
            "DYN_LOCAL_STATE_DIR": str(directory / "state"),
            "DYNAPLAN_NODE_DIR": str(directory / "node"),
            "DYNAPLAN_MEMORY_DIR": str(directory),
            "XDG_RUNTIME_DIR": str(self.runtime_base),
            "HOME": str(directory),
            **(environment or {}),
        }
        self.output = directory / f"serve-{namespace}.txt"
        command = [dynaplan(), "serve", graph, "--port", "0", "--namespace", namespace, *options]
        self.command = [*command, "-f", config] if config else command
        self.process: subprocess.Popen[bytes] | None = None
        self.prints_to: int | None = None
        """The descriptor of a terminal or a pipe that it prints to instead of ``output``."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> Self:
        """Start it; return when every worker of the graph is ready."""
        self.spawn().wait_ready()
        return self

    def spawn(self) -> Self:
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env=self.environment,
                stdout=output if self.prints_to is None else self.prints_to,
                stderr=subprocess.STDOUT,
            )
        return self

    def wait_ready(self, timeout_s: float = 2 * PATIENCE_S) -> None:
        def ready() -> bool:
            assert self.process is not None
            if self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode}:\n{self.text}")
            # The statefile of one that was killed says that all is well, until the next one takes over.
            is_ours = self.statefile().get("arbiter", {}).get("pid") == self.process.pid
            workers = self.workers()
            return is_ours and all(worker.get("state") == "ready" for worker in workers.values())

        try:
            wait_until(ready, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text}\n{self.statefile()}") from error

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    @property
    def statefile_path(self) -> Path:
        return self.directory / "state" / f"{self.namespace}.json"

    def statefile(self) -> dict[str, Any]:
        """The document; empty while there is none, or none that can be read."""
        try:
            document = json.loads(self.statefile_path.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}

    def workers(self, component: str = "") -> dict[str, dict[str, Any]]:
        """The statefile's entries that have a worker, by watcher name."""
        entries = self.statefile().get("components", {})
        return {
            name: entry
            for name, entry in entries.items()
            if entry.get("state", "stopped") != "stopped"
            and (not component or entry.get("component", name) == component)
        }

    @property
    def url(self) -> str:
        return str(self.statefile()["addresses"]["frontend_url"])

    def clients_environment(self) -> dict[str, str]:
        """The addresses and tokens that its clients need."""
        path = Path(self.statefile()["addresses"]["runtime_dir"]) / "clients.json"
        return dict(json.loads(path.read_text()))

    def command_line(self, pid: int, shown: str) -> str:
        """The command line of a process; that in the statefile of a forked worker, which shows another."""
        if FORK_SERVER not in shown:
            return shown
        return next((str(each["cmd"]) for each in self.workers().values() if each.get("pid") == pid), shown)

    def pid_of(self, watcher: str) -> int:
        return int(self.workers()[watcher]["pid"])

    def run(self, *arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Another dynaplan command against this deployment."""
        return subprocess.run(
            [dynaplan(), *arguments],
            cwd=REPOSITORY,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def scale(self, **counts: int) -> None:
        for role, count in counts.items():
            result = self.run("scale", f"{role}={count}", "--namespace", self.namespace)
            assert result.returncode == 0, result.stdout + result.stderr

    def get_json(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return json.load(response)

    def children(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stop(self, timeout_s: float = 60.0) -> int:
        """Ctrl-C; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """Whatever the test did: nothing of this deployment is left."""
        children = self.children() if self.process else []
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(45)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(10)
        deadline_s = time.monotonic() + 6
        while time.monotonic() < deadline_s and any(child.is_running() for child in children):
            time.sleep(0.05)
        left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        names = [" ".join(child.cmdline()) for child in left]
        for child in left:
            child.kill()
        shutil.rmtree(self.runtime_base, ignore_errors=True)
        assert not left, f"left behind: {names}"


def dynaplan() -> str:
    """The installed console script beside this interpreter."""
    return str(Path(sys.executable).with_name("dynaplan"))


def refusal(directory: Path, *graph: str, environment: dict[str, str] | None = None) -> str:
    """What ``serve`` says where it must not start: one message and exit 2, and no statefile of its own."""
    arguments = graph or ("graphs.agg:Frontend", "agg.yaml")
    with Deployment(directory, *arguments, environment=environment) as refused:
        was_there = refused.statefile_path.exists()
        result = refused.run(*refused.command[1:], timeout_s=30)
        assert refused.statefile_path.exists() == was_there
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    return result.stderr


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    """Start deployments; on the way out nothing of any of them may be left."""
    deployments: list[Deployment] = []

    def start(*arguments: Any, wait: bool = True, **keywords: Any) -> Deployment:
        deployment = Deployment(tmp_path, *arguments, **keywords)
        deployments.append(deployment)
        return deployment.start() if wait else deployment.spawn()

    yield start
    for deployment in deployments:
        deployment.close()
