"""Looks at one deployment again and again: all that ``status`` shows, and rates, which take two looks."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from dynaplan.cli.deployment import connect
from dynaplan.cli.watching.figures import Counts, LoadWindow
from dynaplan.cli.watching.gathering import DeploymentAnswers, Gathering, document_of
from dynaplan.cli.watching.routing import routing
from dynaplan.cli.watching.rows import ENGINE_ROLES
from dynaplan.store.instances import public_urls

if TYPE_CHECKING:
    import aiohttp

    from dynaplan.fleet.deployments import RunningDeployment

SELDOM_S = 5.0
"""Time between two looks at what costs the deployment more than the rest, or changes seldom, in seconds:
the frontends' counts, the planner's decisions, the sources of routing."""

LIST_S = 2.0
"""Time between two lists of the store's keys, in seconds; the workers' states come from the statefile."""

GPUS_S = 2.0
"""Time between two readings of the GPUs, in seconds."""

FRONTEND_S = 2.0
"""Seconds in which a frontend must answer."""


class Following:
    """Follows one deployment; ``look`` returns its document, ``close`` ends the connections.

    Raises DeploymentError when no deployment of that namespace runs, at first or any more.
    """

    def __init__(self, namespace: str | None) -> None:
        from dynaplan.fleet.gpu_devices import activity_reader, uses_reader
        from dynaplan.fleet.rules.statefile import inventory_of
        from dynaplan.planner import factory

        self.found: RunningDeployment = connect(namespace)
        self._gathering = Gathering(self.found.namespace)
        self._read_counts = factory.frontend_times(self.found.namespace)
        self._gpus = inventory_of(self.found.document)
        self._read_uses = uses_reader(self._gpus)
        self._read_activity = activity_reader(self._gpus)
        self._session: aiohttp.ClientSession | None = None
        self._window = LoadWindow()
        self._routed: Mapping[str, Mapping[str, str]] = {}
        self._decision: dict[str, Any] = {}
        self._gpu_rows: dict[int, dict[str, Any]] = {}
        self._tokens: dict[str, tuple[float, int]] = {}
        self._listed = DeploymentAnswers()
        self._seldom_s = self._gpus_s = self._listed_s = float("-inf")

    async def look(self) -> dict[str, Any]:
        """Return the document of ``status``, with the load, the GPUs' activity and the last decision."""
        self._find_again()
        now_s = time.monotonic()
        if now_s - self._listed_s >= LIST_S:
            self._listed_s = now_s
            self._listed = await self._gathering.listed()
        engines = [each for each in self._listed.registered if each.card.get("role") in ENGINE_ROLES]
        answers = replace(self._listed, loads=await self._gathering.loads(engines))
        if now_s - self._seldom_s >= SELDOM_S:
            self._seldom_s = now_s
            await self._look_seldom(answers)
        if self._gpus and now_s - self._gpus_s >= GPUS_S:
            self._gpus_s = now_s
            self._gpu_rows = await asyncio.to_thread(self._read_gpus)
        document = document_of(self.found, answers, self._routed)
        for row in document["workers"]:
            load = answers.loads.get(row["worker"])
            generated = load.generated_tokens if load else None
            row["tokens_per_s"] = self._tokens_per_s(row["worker"], now_s, generated)
        for row in document["gpus"]:
            row |= self._gpu_rows.get(row["index"], {})
        figures = self._window.figures()
        return {**document, "load": asdict(figures) if figures else None, **self._decision}

    async def close(self) -> None:
        """Close the connections to the store, the workers and the frontends."""
        if self._session:
            await self._session.close()
        await self._gathering.close()

    def _find_again(self) -> None:
        from dynaplan.fleet.deployments import find_deployment

        self.found = find_deployment(self.found.namespace)

    async def _look_seldom(self, answers: DeploymentAnswers) -> None:
        from dynaplan.planner import factory
        from dynaplan.planner.rules.explaining import in_one_line

        self._routed = await routing(answers.registered)
        counts: dict[tuple[str, str], float] = {}
        for each in [await self._counts(url) for url in public_urls(answers.registered)]:
            for key, value in (each or {}).items():
                counts[key] = counts.get(key, 0.0) + value
        if counts:
            self._window.add(time.monotonic(), counts)
        records = factory.recent_decisions(self.found.log_dir / "planner", 1)
        if records:
            budget = records[0].get("next_state", {}).get("error_budget")
            self._decision = {"last_decision": in_one_line(records[0]), "error_budget": budget}

    async def _counts(self, url: str) -> Counts | None:
        """Return the counts of the frontends at that address; None when they do not answer."""
        import aiohttp

        from dynaplan.config import certificates

        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=certificates.authorities(os.environ))
            timeout = aiohttp.ClientTimeout(total=FRONTEND_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        try:
            async with self._session.get(f"{url}/metrics", raise_for_status=True) as response:
                return self._read_counts(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    def _tokens_per_s(self, worker: str, now_s: float, generated: int | None) -> float | None:
        """Return the tokens that a worker has generated since the last look, per second."""
        before = self._tokens.pop(worker, None)
        if generated is None:
            return None
        self._tokens[worker] = (now_s, generated)
        if before is None or generated < before[1] or now_s <= before[0]:
            return None
        return (generated - before[1]) / (now_s - before[0])

    def _read_gpus(self) -> dict[int, dict[str, Any]]:
        uses, activity = self._read_uses(), self._read_activity()
        sessions = {worker.pid for worker in self.found.workers if worker.pid}
        rows: dict[int, dict[str, Any]] = {}
        for gpu in self._gpus:
            use, doing = uses.get(gpu.index), activity.get(gpu.index)
            others = [each for each in use.processes if _session(each.pid) not in sessions] if use else []
            rows[gpu.index] = {
                "used_bytes": use.used_bytes if use else None,
                "utilisation": doing.utilisation if doing else None,
                "watts": doing.watts if doing else None,
                "others": [f"{each.name or 'a process'} ({each.pid})" for each in others if each.pid],
            }
        return rows


def _session(pid: int) -> int:
    """Return the session of a process: that of an engine is its worker's; 0 when the process is gone."""
    try:
        return os.getsid(pid) if pid else 0
    except OSError:
        return 0
