"""Readiness: when a deployment serves, and what is missing until then."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dynaplan.fleet.launch import Launch
from dynaplan.fleet.rules.statefile import fleet_of
from dynaplan.fleet.servers import ServerSpec
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.http.client import try_get
from dynaplan.util import screen
from dynaplan.util.errors import StatefileCorrupt

READINESS_POLL_S = 0.05
LATE_POLL_S = 1.0
"""Time between two looks, in seconds, once it was reported what is late: that may last."""

HEALTH_TIMEOUT_S = 1.0
REST_S = 5.0
"""Time, from the first answer on, after which it is reported how many workers are ready."""

SLOW_S = 10.0
"""Time after which it is reported which workers and servers are not ready yet, in seconds."""


class RecordedWorkers:
    """The workers as the fleet plugin has written them down, read again when the statefile changes."""

    def __init__(self, statefile: Path) -> None:
        self._path = statefile
        self._version = (0, 0)
        self._workers: tuple[Worker, ...] = ()

    def read(self) -> tuple[Worker, ...]:
        """Return the workers; empty while the statefile cannot be read, which the plugin then writes anew."""
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns)  # a new file with each change
            if version != self._version:
                document = StatefileStore(self._path).read()
                self._version, self._workers = version, fleet_of(document) if document else ()
        except (OSError, StatefileCorrupt):
            return ()
        return self._workers


class Readiness:
    """Whether the Frontend answers; without a Frontend, whether every worker is ready."""

    def __init__(self, launch: Launch, servers: Sequence[ServerSpec], workers: RecordedWorkers) -> None:
        self._launch = launch
        self._servers = servers
        self._workers = workers

    async def wait(self, report: Callable[[str], None]) -> None:
        """Return when the deployment is ready; report what is missing after ``SLOW_S``."""
        report_at_s = time.monotonic() + SLOW_S
        while not await self._is_ready():
            await asyncio.sleep(READINESS_POLL_S if report_at_s < math.inf else LATE_POLL_S)
            if time.monotonic() > report_at_s:
                report_at_s = math.inf
                missing = ", ".join(await self._missing())
                report(screen.warning(f"Not ready after {SLOW_S:g} s; waiting for: {missing}"))

    async def wait_for_rest(self, report: Callable[[str], None], begun_s: float) -> None:
        """Return when each worker with an engine is ready; report how many are, and when all are.

        ``begun_s`` is the beginning of the start, on the monotonic clock.
        """
        report_at_s, has_reported = time.monotonic() + REST_S, False
        while late := self._late():
            await asyncio.sleep(LATE_POLL_S if has_reported else READINESS_POLL_S)
            if not has_reported and time.monotonic() > report_at_s:
                has_reported = True
                total = len(self._engine_workers())
                ready = f"{total - len(late)} of {total} workers are ready"
                report(screen.warning(f"{ready}; waiting for: {', '.join(late)}"))
        if has_reported:
            total, took_s = len(self._engine_workers()), time.monotonic() - begun_s
            report(screen.good(f"All {total} workers are ready after {took_s:.1f} s."))

    def _engine_workers(self) -> list[Worker]:
        return [each for each in self._workers.read() if each.role in (Role.DECODE, Role.PREFILL)]

    def _late(self) -> list[str]:
        """Return the workers with an engine that are to get requests and are not ready."""
        coming = (WorkerState.STARTING, WorkerState.BACKOFF, WorkerState.FAILED)
        return [
            f"{each.name} ({each.state.value})" for each in self._engine_workers() if each.state in coming
        ]

    async def _is_ready(self) -> bool:
        if self._launch.graph.of_role(Role.FRONTEND) is None:
            return {worker.state for worker in self._workers.read()} == {WorkerState.READY}
        answer = await try_get(f"{self._launch.frontend_url}/health", timeout_s=HEALTH_TIMEOUT_S)
        return answer is not None and answer.status == 200

    async def _missing(self) -> list[str]:
        """Return the servers and workers that are not ready yet, in words."""
        silent = [server.name for server in self._servers if not await server.is_ready()]
        late = [
            f"{each.name} ({each.state.value})"
            for each in self._workers.read()
            if each.state is not WorkerState.READY
        ]
        return [*silent, *late] or ["the Frontend"]
