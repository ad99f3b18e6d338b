"""``GET /metrics/all``: every worker, the planner, the frontends, the fleet and the GPUs, in one text.

All are texts in Prometheus' format, which are merged into one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dynaplan.config.service_config import ServiceConfig
from dynaplan.contract.gpu_standing import SET_APART, GpuStandings
from dynaplan.contract.gpus import Gpu, GpuActivity, GpuUse
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts, planner_prefix
from dynaplan.fleet.gpu_devices import activity_reader, uses_reader
from dynaplan.fleet.gpu_inventory import shown_gpus
from dynaplan.fleet.rules.power import ModelPower, PowerMeter, SourceModel, watts_by_model
from dynaplan.fleet.rules.statefile import Document, fleet_of, planner_keys_of
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.graph.lifecycle import HOLDS_GPUS
from dynaplan.http.client import HttpClient
from dynaplan.process.node_directory import node_dir
from dynaplan.store.instances import SERVICES_PREFIX, Instance
from dynaplan.util.blocking_call import BlockingCall
from dynaplan.util.errors import DynaplanError
from dynaplan.util.prometheus_text import escaped, read_samples

if TYPE_CHECKING:
    from dynaplan.worker.worker_runtime import WorkerRuntime

log = logging.getLogger(__name__)

METRICS_CACHE_S = 1.0
"""Time for which an answer of ``/metrics/all`` is reused, so that workers are not asked more often."""

METRICS_TIMEOUT_S = 2.0
"""Time in which a worker must answer with its metrics; one that does not is left out.

The GPUs' driver too: when it does not answer its last samples are told.
"""

WORKER = "worker"
"""The label that says whose sample it is."""

FleetSample = tuple[str, str, Mapping[str, str], float]
"""Name, help, labels and value of one sample."""


class DeploymentMetrics:
    def __init__(self, runtime: WorkerRuntime) -> None:
        self._runtime = runtime
        self._http = HttpClient(tls=runtime.client_tls)
        self._answer = b""
        self._answered_s = float("-inf")
        self._one = asyncio.Lock()
        path = os.environ.get("DYNAPLAN_STATEFILE")
        self._statefile = StatefileStore(Path(path)) if path else None
        self._gpus: tuple[Gpu, ...] = ()
        self._read_gpus: Callable[[], list[FleetSample]] = list
        self._gpu_samples = BlockingCall[list[FleetSample]](lambda: self._read_gpus(), [])
        self._meter = PowerMeter()

    async def read(self, render_own: Callable[[], bytes]) -> bytes:
        """Return the whole text; ``render_own`` returns the part of the frontends on this port."""
        async with self._one:
            if time.monotonic() - self._answered_s >= METRICS_CACHE_S:
                self._answer = (await self._gather(render_own)).encode()
                self._answered_s = time.monotonic()
            return self._answer

    async def close(self) -> None:
        await self._http.close()

    async def _gather(self, render_own: Callable[[], bytes]) -> str:
        namespace = self._runtime.namespace
        document = await asyncio.to_thread(self._read_document)
        gpus = shown_gpus(document, ServiceConfig.get_instance()) if document else self._gpus
        samples = list(fleet_samples(document, has_gpus=bool(gpus))) if document else []
        samples += illness_samples(document) if document else ()
        if gpus != self._gpus:
            self._gpus = gpus
            self._read_gpus = _gpu_reader(gpus) if gpus else list
        samples += await self._gpu_samples.latest_value(METRICS_TIMEOUT_S)
        texts = [("", render_own().decode())]
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                items = await self._runtime.store.list(planner_prefix(namespace))
                registered = await self._runtime.store.list(f"{SERVICES_PREFIX}{namespace}/")
        except (DynaplanError, TimeoutError) as error:
            log.debug("the store does not answer: %s", error)
        else:
            samples += desired_samples(
                DesiredCounts.from_keys(namespace, {item.key: item.value for item in items})
            )
            instances = list(_instances(item.value for item in registered))
            texts += await self._scrape_components(instances)
            samples += self._power_samples(document, samples, instances, texts)
        return merge([*texts, ("", render_samples(namespace, samples))])

    def _read_document(self) -> Document | None:
        try:
            return self._statefile.read() if self._statefile else None
        except DynaplanError:
            return None

    def _power_samples(
        self,
        document: Document | None,
        samples: Iterable[FleetSample],
        instances: Iterable[Instance],
        texts: Iterable[tuple[str, str]],
    ) -> list[FleetSample]:
        """Return the power of each model, and the energy of its tokens."""
        by_gpu = {
            int(labels["gpu"]): value for name, _, labels, value in samples if name == "dynaplan_gpu_watts"
        }
        models = {each.component: str(each.card["model"]) for each in instances if each.card.get("model")}
        watts = watts_by_model(by_gpu, fleet_of(document) if document else (), models)
        power = self._meter.add(time.monotonic(), watts, tokens_by_source(texts))
        return list(power_samples(power))

    async def _scrape_components(self, instances: Iterable[Instance]) -> list[tuple[str, str]]:
        """Scrape every component with a URL: (worker, Prometheus text)."""
        found = {each.worker: each.url for each in instances if each.url}
        texts = await asyncio.gather(*(_fetch(self._http, url) for url in found.values()))
        return list(zip(found, texts, strict=True))


def fleet_samples(document: Document, *, has_gpus: bool = True) -> Iterator[FleetSample]:
    """Yield the state and the restarts of every worker in the statefile, and the GPUs that it holds."""
    about = "State of a worker; 1 for the state that it is in"
    for worker in fleet_of(document):
        labels = {"worker": worker.name, "component": worker.component, "role": worker.role.value}
        yield "dynaplan_worker_state", about, {**labels, "state": worker.state.value}, 1.0
        restarts = float(len(worker.restarts_s))
        yield "dynaplan_worker_recent_restarts", "Restarts that still count to the limit", labels, restarts
        for index in worker.gpus if has_gpus and worker.state in HOLDS_GPUS else ():
            held = {"gpu": str(index), "worker": worker.name}
            yield "dynaplan_gpu_held", "1 for each worker that holds the GPU", held, 1.0


def illness_samples(document: Document) -> Iterator[FleetSample]:
    """Yield a sample for each GPU that is set apart."""
    try:
        standings = GpuStandings.from_text(planner_keys_of(document).get(SET_APART, ""))
    except ValueError:
        return
    for index, why in standings.apart.items():
        yield (
            "dynaplan_gpu_set_apart",
            "1 for a GPU that no worker gets",
            {"gpu": str(index), "why": why},
            1.0,
        )


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
            ("power_limit_watts", "The most power that the GPU may draw", work.limit_watts),
            ("celsius", "Temperature of the GPU", work.celsius),
        ):
            if value is not None:
                labels = {"gpu": str(gpu.index), "name": gpu.name}
                yield f"dynaplan_gpu_{name}", about, labels, float(value)


def power_samples(power: Mapping[str, ModelPower]) -> Iterator[FleetSample]:
    """Yield the power of each model, and the energy of its tokens where it had any."""
    energy = "Watt-hours that 1,000 tokens of the model took lately"
    for model, each in power.items():
        labels = {"model": model}
        yield (
            "dynaplan_model_watts",
            "Power of the model's workers, by their parts of GPUs",
            labels,
            each.watts,
        )
        if each.wh_per_1000_tokens is not None:
            yield "dynaplan_model_wh_per_1000_tokens", energy, labels, each.wh_per_1000_tokens


def tokens_by_source(texts: Iterable[tuple[str, str]]) -> dict[SourceModel, float]:
    """Return the tokens that frontends have sent so far, of (source, metrics)."""
    found: dict[SourceModel, float] = {}
    for source, text in texts:
        for _, labels, value in read_samples(text, lambda name: name.endswith("_output_tokens_total")):
            key = source, labels.get("model", "")
            found[key] = found.get(key, 0.0) + value
    return found


def _instances(values: Iterable[str]) -> Iterator[Instance]:
    """Yield the registrations that can be read."""
    for value in values:
        with suppress(ValueError):
            yield Instance.from_json(value)


def _gpu_reader(gpus: tuple[Gpu, ...]) -> Callable[[], list[FleetSample]]:
    directory = node_dir(os.environ)
    uses, activity = uses_reader(gpus, directory), activity_reader(gpus, directory)
    return lambda: list(gpu_samples(gpus, uses(), activity()))


def render_samples(namespace: str, samples: list[FleetSample]) -> str:
    """Return the samples in Prometheus' text format; ``merge`` brings those of one name together."""
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


async def _fetch(http: HttpClient, url: str) -> str:
    """Return the metrics of a worker; empty when it does not answer with any."""
    try:
        return (await http.get(f"{url}/metrics", timeout_s=METRICS_TIMEOUT_S)).body.decode()
    except (OSError, UnicodeDecodeError) as error:
        log.debug("no metrics from %s: %s", url, error)
        return ""


@dataclass
class _MetricFamily:
    head: list[str] = field(default_factory=list)
    samples: list[str] = field(default_factory=list)


def merge(texts: Iterable[tuple[str, str]]) -> str:
    """Return the texts of (worker, metrics) as one, each family with one head and all samples below it.

    Prometheus refuses a text that says the type of a metric twice. Samples get the label ``worker`` unless
    they have it, or the name is empty. The head of a family is that of the first text that has it.
    """
    families: dict[str, _MetricFamily] = {}
    for worker, text in texts:
        label = f'{WORKER}="{escaped(worker)}"' if worker else ""
        headed, name = set[str](), ""
        for line in text.splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, _MetricFamily())
                if name in headed or not family.head:
                    headed.add(name)
                    family.head.append(line)
            elif line and not line.startswith("#"):
                sample = line.partition("{")[0].partition(" ")[0]
                owner = name if name and sample.startswith(name) else sample
                families.setdefault(owner, _MetricFamily()).samples.append(_add_label(line, label))
    lines = [line for each in families.values() if each.samples for line in (*each.head, *each.samples)]
    return "".join(f"{line}\n" for line in lines)


def _add_label(line: str, label: str) -> str:
    name, brace, rest = line.partition("{")
    if not label or f'{WORKER}="' in rest:
        return line
    if not brace:
        name, _, value = line.partition(" ")
        return f"{name}{{{label}}} {value}"
    return f"{name}{{{label}{'' if rest.startswith('}') else ','}{rest}"
