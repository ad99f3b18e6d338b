"""Prometheus servers for tests: one that answers as told, and a real one where its binary is there.

The first copies ``/api/v1/query`` as https://prometheus.io/docs/prometheus/latest/querying/api/ has it: an
instant vector, values as text beside their time; an error with ``errorType`` and ``error`` and a status 4xx.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web


class PrometheusStandIn:
    """Answers every query with ``series``: (labels, value as text); or with ``status`` and ``body``."""

    def __init__(self) -> None:
        self.series: list[tuple[dict[str, str], str]] = []
        self.status = 200
        self.body: str | None = None
        self.queries: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen; the address of its endpoint."""
        application = web.Application()
        application.router.add_post("/prefix/api/v1/query", self._query)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}/prefix/"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner:
            await self._runner.cleanup()

    async def _query(self, request: web.Request) -> web.Response:
        self.queries.append(str((await request.post())["query"]))
        if self.body is not None:
            return web.Response(status=self.status, text=self.body)
        result = [{"metric": labels, "value": [1435781451.781, value]} for labels, value in self.series]
        return web.json_response(
            {"status": "success", "data": {"resultType": "vector", "result": result}}, status=self.status
        )


PROMETHEUS_VARIABLE = "DYNAPLAN_PROMETHEUS"
"""The environment variable that names a Prometheus server's binary; ``tests.debian`` fetches Debian's."""


def find_prometheus() -> str | None:
    """The binary that the environment names, or the one on PATH; None without either."""
    named = os.environ.get(PROMETHEUS_VARIABLE, "")
    return named if os.access(named, os.X_OK) else shutil.which("prometheus")


CONFIGURATION = """
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
  - job_name: frontends
    static_configs: [{{targets: {targets}}}]
"""


@asynccontextmanager
async def real_prometheus(binary: str, directory: Path, targets: list[str]) -> AsyncIterator[str]:
    """A Prometheus server that scrapes these ``host:port`` five times a second; its address."""
    configuration = directory / "prometheus.yml"
    configuration.write_text(CONFIGURATION.format(targets=targets))
    process = await asyncio.create_subprocess_exec(
        binary,
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        stderr=PIPE,
    )
    reading = None
    try:
        port = await asyncio.wait_for(_port(process), 10)
        reading = asyncio.create_task(_read_on(process))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        await process.wait()
        if reading:
            await reading


async def _port(process: Process) -> int:
    """The port of the line that says where it listens."""
    said: list[str] = []
    while line := await _line(process):
        said.append(line)
        if "Listening on" in line and (found := re.search(r"address=127\.0\.0\.1:(\d+)", line)):
            return int(found[1])
    raise AssertionError(f"Prometheus did not start: {said[-5:]}")


async def _read_on(process: Process) -> None:
    while await _line(process):
        pass


async def _line(process: Process) -> str:
    stderr: Any = process.stderr
    return (await stderr.readline()).decode(errors="replace")
