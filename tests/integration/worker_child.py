"""A worker process as the supervisor starts it, for tests that look at it from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.instances import Instance
from tests.fakes.load import Outcome, stream_one
from tests.fakes.polling import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
TOKEN = "worker-token-of-this-test"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}

STOCK_GRAPH = "graphs.disagg:Frontend"

FRAGILE_GRAPH = """
from typing import Any
from dynaplan.graph.service import dynamo_context
from dynaplan.graph.endpoints import endpoint, on_shutdown
from dynaplan.graph.service import service


@service
class Fragile:
    @endpoint
    async def generate(self, _: Any) -> str:
        dynamo_context["runtime"].spawn(self.fail(), "something in the background")
        return "ok"

    async def fail(self) -> None:
        raise ValueError("something broke")

    @on_shutdown
    def bye(self) -> None:
        print("the shutdown hook ran")
"""


class Worker:
    """One worker process with its log, its registration and its HTTP server."""

    def __init__(
        self, directory: Path, servers: dict[str, str], service: str, graph: str, **environment: str
    ) -> None:
        (directory / "fragile.py").write_text(FRAGILE_GRAPH)
        self.name = environment.get("DYNAPLAN_WORKER_NAME", f"ns_{service}")
        self.service = service
        self.directory = directory
        self.log_path = directory / f"{self.name}.log"
        self.environment = {
            **os.environ,
            **servers,
            "PYTHONPATH": str(ROOT),
            "DYN_NAMESPACE": "ns",
            "DYNAPLAN_WORKER_NAME": self.name,
            "DYNAPLAN_WORKER_TOKEN": TOKEN,
            "DYNAPLAN_LOG_DIR": str(directory),
            "DYNAPLAN_PARENT_PID": str(os.getpid()),
            **environment,
        }
        self.command = [
            *(sys.executable, "-m", "dynaplan.worker.main", graph),
            *("--service-name", service, "--worker-id", "1"),
        ]
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def spawn(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=self.directory, env=self.environment)

    async def start(self, store: EtcdStore) -> Instance:
        self.spawn()
        found: Instance = await eventually(lambda: self.registration(store))
        self.url = found.url
        return found

    async def registration(self, store: EtcdStore) -> Instance | None:
        items = await store.list(f"/services/ns/{self.service}/")
        found = (Instance.from_json(item.value) for item in items)
        return next((instance for instance in found if instance.worker == self.name), None)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def proof(self) -> str:
        return re.search(r"drained: .*", self.log)[0]  # type: ignore[index]

    async def exit_code(self, timeout_s: float = PATIENCE_S) -> int:
        assert self.process is not None
        await eventually(lambda: self.process.poll() is not None, timeout_s)
        return self.process.returncode

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def stream(self, session: aiohttp.ClientSession, tokens: int) -> Outcome:
        return await stream_one(session, self.url, "sim", "Tell me about the lights.", tokens, AUTHORIZATION)

    async def running(self, session: aiohttp.ClientSession) -> int:
        async with session.get(f"{self.url}/load_metrics") as response:
            load: dict[str, Any] = await response.json()
            return int(load["worker_stats"]["request_active_slots"])

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Workers:
    """Starts workers for one test and leaves none of them running."""

    def __init__(self, tmp_path: Path, servers: dict[str, str]) -> None:
        self._tmp_path = tmp_path
        self._servers = servers
        self._made: list[Worker] = []

    def make(
        self,
        service: str = "VllmWorker",
        settings: Mapping[str, Any] | None = None,
        graph: str = STOCK_GRAPH,
        **environment: str,
    ) -> Worker:
        config = {service: {"model": "sim", **(settings or {})}}
        text = {"DYNAMO_SERVICE_CONFIG": json.dumps(config), **environment}
        worker = Worker(self._tmp_path, self._servers, service, graph, **text)
        self._made.append(worker)
        return worker

    def end(self) -> None:
        for worker in self._made:
            worker.end()


def workers_of(tmp_path: Path, servers: dict[str, str]) -> Iterator[Workers]:
    """For a fixture: workers that use these servers."""
    made = Workers(tmp_path, servers)
    yield made
    made.end()
