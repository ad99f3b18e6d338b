"""``GET /metrics/all``: every worker, the planner, the frontends, the fleet and the GPUs, in one text."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from dynaplan.fleet import local_host
from dynaplan.fleet.desired_counts import SCALED_ROLES, DesiredCounts, planner_prefix
from dynaplan.fleet.gpus import Gpu, GpuActivity, GpuUse
from dynaplan.fleet.rules.statefile import Document, fleet_of, inventory_of
from dynaplan.gateway.reporting.merging import escaped, merged
from dynaplan.graph.lifecycle import HOLDS_GPUS
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.util.errors import DynaplanError

if TYPE_CHECKING:
    from dynaplan.worker.process import WorkerRuntime

log = logging.getLogger(__name__)

KEPT_S = 1.0
"""Time for which an answer is given again, in seconds, so that workers are not asked more often."""

ANSWER_S = 2.0
"""Seconds in which a worker must answer; one that does not is left out, and its state says why."""

FleetSample = tuple[str, str, Mapping[str, str], float]
"""Name, help, labels and value of one sample."""


class AllMetrics:
    """Gathers the metrics of the deployment; ``own`` returns those of the frontends on this port."""

    def __init__(self, runtime: WorkerRuntime, own: Callable[[], bytes]) -> None:
        self._runtime = runtime
        self._own = own
        self._session: aiohttp.ClientSession | None = None
        self._answer = b""
        self._answered_s = float("-inf")
        self._one = asyncio.Lock()
        path = os.environ.get("DYNAPLAN_STATEFILE")
        self._statefile = local_host.open_statefile(Path(path)) if path else None
        self._gpus: tuple[Gpu, ...] = ()
        self._read_gpus: Callable[[], list[FleetSample]] = list

    async def __call__(self) -> bytes:
        """Return the whole text."""
        async with self._one:
            if time.monotonic() - self._answered_s >= KEPT_S:
                self._answer = (await self._gathered()).encode()
                self._answered_s = time.monotonic()
            return self._answer

    async def close(self) -> None:
        """Close the connections to the workers."""
        if self._session:
            await self._session.close()

    async def _gathered(self) -> str:
        namespace = self._runtime.namespace
        document = await asyncio.to_thread(self._document)
        samples = list(fleet_samples(document)) if document else []
        if document and inventory_of(document) != self._gpus:
            self._gpus = inventory_of(document)
            self._read_gpus = _gpu_reader(self._gpus)
        samples += await asyncio.to_thread(self._read_gpus)
        texts = [("", self._own().decode())]
        try:
            async with asyncio.timeout(ANSWER_S):
                items = await self._runtime.store.list(planner_prefix(namespace))
                registered = await self._runtime.store.list(f"{SERVICES_PREFIX}{namespace}/")
        except (DynaplanError, TimeoutError) as error:
            log.debug("the store does not answer: %s", error)
        else:
            samples += desired_samples(
                DesiredCounts.from_keys(namespace, {item.key: item.value for item in items})
            )
            texts += await self._of_workers(item.value for item in registered)
        return merged([*texts, ("", rendered(namespace, samples))])

    def _document(self) -> Document | None:
        try:
            return self._statefile.read() if self._statefile else None
        except DynaplanError:
            return None

    async def _of_workers(self, values: Iterator[str]) -> list[tuple[str, str]]:
        """Ask every registered component that can be called for its metrics."""
        found: dict[str, str] = {}
        for value in values:
            try:
                instance = Instance.from_json(value)
            except ValueError:
                continue
            if instance.url:
                found[instance.worker] = instance.url
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._runtime.client_tls)
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        session = self._session
        texts = await asyncio.gather(*(_text(session, url) for url in found.values()))
        return list(zip(found, texts, strict=True))


def fleet_samples(document: Document) -> Iterator[FleetSample]:
    """Yield the state and the restarts of every worker in the statefile, and the GPUs that it holds."""
    about = "State of a worker; 1 for the state that it is in"
    for worker in fleet_of(document):
        labels = {"worker": worker.name, "component": worker.component, "role": worker.role.value}
        yield "dynaplan_worker_state", about, {**labels, "state": worker.state.value}, 1.0
        restarts = float(len(worker.restarts_s))
        yield "dynaplan_worker_recent_restarts", "Restarts that still count to the limit", labels, restarts
        for index in worker.gpus if worker.state in HOLDS_GPUS else ():
            held = {"gpu": str(index), "worker": worker.name}
            yield "dynaplan_gpu_held", "1 for each worker that holds the GPU", held, 1.0


def desired_samples(counts: DesiredCounts) -> Iterator[FleetSample]:
    """Yield the number of workers that is asked for, of each role that can be scaled."""
    for role in SCALED_ROLES:
        if counts.of(role) >= 0:
            labels = {"role": role.value}
            yield "dynaplan_desired_workers", "Workers that are asked for", labels, float(counts.of(role))


def gpu_samples(
    gpus: Iterable[Gpu], used: Mapping[int, GpuUse], doing: Mapping[int, GpuActivity]
) -> Iterator[FleetSample]:
    """Yield memory, use and power of each GPU, as far as they are known."""
    for gpu in gpus:
        use, work = used.get(gpu.index), doing.get(gpu.index, GpuActivity())
        for name, about, value in (
            ("memory_bytes", "Memory of the GPU", gpu.memory_bytes),
            ("memory_used_bytes", "Memory of the GPU in use", use.used_bytes if use else None),
            ("utilisation", "Part of the time in which the GPU works", work.utilisation),
            ("watts", "Power that the GPU draws", work.watts),
        ):
            if value is not None:
                labels = {"gpu": str(gpu.index), "name": gpu.name}
                yield f"dynaplan_gpu_{name}", about, labels, float(value)


def _gpu_reader(gpus: tuple[Gpu, ...]) -> Callable[[], list[FleetSample]]:
    uses, activity = local_host.gpu_uses(gpus), local_host.gpu_activity(gpus)
    return lambda: list(gpu_samples(gpus, uses(), activity()))


def rendered(namespace: str, samples: list[FleetSample]) -> str:
    """Return the samples in Prometheus' text format; ``merged`` brings those of one name together."""
    heads = {name: f"# HELP {name} {about}\n# TYPE {name} gauge\n" for name, about, _, _ in samples}
    lines = []
    for name, head in heads.items():
        lines.append(head)
        for other, _, labels, value in samples:
            if other == name:
                written = {"dynamo_namespace": namespace, **labels}
                pairs = ",".join(f'{key}="{escaped(text)}"' for key, text in written.items())
                lines.append(f"{name}{{{pairs}}} {value:.17g}\n")
    return "".join(lines)


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    """Return the metrics of a worker; empty when it does not answer with any."""
    try:
        async with session.get(f"{url}/metrics", raise_for_status=True) as response:
            return await response.text()
    except (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError) as error:
        log.debug("no metrics from %s: %s", url, error)
        return ""
