"""Polls one deployment: all that ``status`` shows, and rates, which take two polls.

The rates and times of the last minute are differences of two readings of the frontends' counters.
"""

from __future__ import annotations

import math
import os
import pwd
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dynaplan.cli.running_deployment import (
    connect,
    decisions_of,
    gpus_of,
    manual_changes_of,
    planner_components,
)
from dynaplan.cli.status_document import (
    ENGINE_ROLES,
    DeploymentState,
    StatusReader,
    deployment_document,
    models_of_components,
    read_draining,
    read_keys,
    read_routing,
)
from dynaplan.cli.timing import GPU_POLL_S, METRICS_TIMEOUT_S, SLOW_POLL_S, STORE_POLL_S
from dynaplan.config import certificates
from dynaplan.fleet.deployment_metrics import tokens_by_source
from dynaplan.fleet.gpu_devices import activity_reader, uses_reader
from dynaplan.fleet.rules.power import PowerMeter, SourceModel, watts_by_model
from dynaplan.http.client import HttpClient
from dynaplan.http.routes import LOAD_HISTORY_PATH
from dynaplan.planner.metrics.exposition import (
    ITL,
    OSL,
    REQUESTS,
    TTFT,
    Counts,
    Exposition,
    Key,
    has_restarted,
    increase,
    metrics_prefix,
)
from dynaplan.planner.recorders.decision_log import record_time_s
from dynaplan.planner.rules.explain import summarize
from dynaplan.process.kernel import command_line
from dynaplan.store.instances import public_urls
from dynaplan.util.blocking_call import BlockingCall
from dynaplan.util.documents import parse_object
from dynaplan.util.masking import mask_secrets

if TYPE_CHECKING:
    from dynaplan.contract.gpus import GpuProcess
    from dynaplan.fleet.deployments import RunningDeployment
    from dynaplan.planner.recorders.manual_changes import ManualChange


ALL_MODELS = ""


class StatusPoller:
    """Follows one deployment; ``poll`` returns its document, ``close`` ends the connections.

    Raises DeploymentError when no deployment of that namespace runs, at first or any more.
    """

    def __init__(self, namespace: str | None) -> None:
        self.found: RunningDeployment = connect(namespace)
        self._reader = StatusReader(self.found.namespace)
        self._gpus = gpus_of(self.found)
        self._read_uses = uses_reader(self._gpus)
        self._read_activity = activity_reader(self._gpus)
        self._http: HttpClient | None = None
        self._read_load = Exposition(
            metrics_prefix(), self.found.namespace, buckets=(TTFT, ITL)
        ).read_by_model
        self._loads: dict[str, LoadWindow] = {}
        self._decisions: dict[str, dict[str, Any]] = {}
        self._routed: Mapping[str, Mapping[str, str]] = {}
        self._keys: Sequence[Mapping[str, Any]] = ()
        self._gpu_rows = BlockingCall[dict[int, dict[str, Any]]](self._read_gpus, {})
        self._gpus_shown: dict[int, dict[str, Any]] = {}
        self._by_hand: list[ManualChange] = []
        self._tokens: dict[str, tuple[float, int]] = {}
        self._meter = PowerMeter()
        self._metrics: dict[str, bytes] = {}
        self._tokens_sent: Mapping[SourceModel, float] = {}
        self._listed = DeploymentState()
        self._seldom_s = self._gpus_s = self._listed_s = float("-inf")

    async def poll(self) -> dict[str, Any]:
        """Return the document of ``status``, with the load, the GPUs' activity and the last decision.

        Each planned model has a load and a last decision of its own.
        """
        self._refresh()
        now_s = time.monotonic()
        if now_s - self._listed_s >= STORE_POLL_S:
            self._listed_s = now_s
            self._listed = await self._reader.read_store()
        engines = [each for each in self._listed.registered if each.card.get("role") in ENGINE_ROLES]
        loads, draining = await self._reader.read_loads(engines), await read_draining(self.found.workers)
        answers = replace(self._listed, loads=loads, draining=draining)
        if now_s - self._seldom_s >= SLOW_POLL_S:
            self._seldom_s = now_s
            await self._poll_slow_sources(answers)
        if self._gpus and now_s - self._gpus_s >= GPU_POLL_S:
            self._gpus_s = now_s
            self._gpus_shown = await self._gpu_rows.latest_value(GPU_POLL_S)
        document = deployment_document(self.found, replace(answers, keys=self._keys), self._routed)
        power = self._power(now_s)
        for row in document["workers"]:
            load = answers.loads.get(row["worker"])
            generated = load.generated_tokens if load else None
            row["tokens_per_s"] = self._tokens_per_s(row["worker"], now_s, generated)
        for row in document["gpus"]:
            row |= self._gpus_shown.get(row["index"], {})
        for model, row in document["on_request"].items():
            row |= {"load": self._load(model), "power": power.get(model)}
        for model, planned in document["planned_models"].items():
            planned |= self._planning(model, planned["targets"])
        by_hand = [asdict(each) for each in self._by_hand]
        shown = {"by_hand": by_hand, "power": power.get(ALL_MODELS)}
        return {**document, **shown, **self._planning("", document["targets"])}

    async def close(self) -> None:
        if self._http:
            await self._http.close()
        await self._reader.close()

    def _refresh(self) -> None:
        from dynaplan.fleet.deployments import find_deployment

        self.found = find_deployment(self.found.namespace)

    async def _poll_slow_sources(self, answers: DeploymentState) -> None:
        self._routed = await read_routing(answers.registered)
        self._keys = await read_keys(self.found, answers.registered)
        await self._poll_metrics(public_urls(answers.registered))
        planners, at_s = planner_components(self.found), time.monotonic()
        self._tokens_sent = tokens_by_source(
            (url, text.decode(errors="replace")) for url, text in self._metrics.items()
        )
        for model, counts in self._counts(self._metrics.values()).items():
            self._loads.setdefault(model, LoadWindow()).add(at_s, counts)
        for model, component in planners.items():
            if records := decisions_of(self.found, 1, component):
                budget = records[0].get("next_state", {}).get("error_budget")
                self._decisions[model] = {
                    "last_decision": summarize(records[0]),
                    "decided_unix_s": record_time_s(records[0]),
                    "error_budget": budget,
                }
        self._by_hand = manual_changes_of(self.found, 1)

    async def _poll_metrics(self, urls: Iterable[str]) -> None:
        """Read the metrics of the frontends; one that does not answer counts as it last did.

        One that is there for the first time brings what it has counted in its life: the load is begun anew.
        """
        read = {url: await self._get(f"{url}/metrics") or self._metrics.get(url, b"") for url in urls}
        metrics = {url: text for url, text in read.items() if text}
        if metrics.keys() - self._metrics.keys():
            self._loads.clear()
        self._metrics = metrics

    def _counts(self, texts: Iterable[bytes]) -> dict[str, Counts]:
        """Return the counts of all frontends for each model, and under "" those of all models together."""
        sums: dict[str, Counts] = {}
        for text in texts:
            for model, counts in self._read_load(text).items():
                for each in {model, ""}:  # a set: samples without a model count once
                    own = sums.setdefault(each, {})
                    for key, value in counts.items():
                        own[key] = own.get(key, 0.0) + value
        return sums

    def _planning(self, model: str, targets: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the load of a model, or with "" of all, and the last decision of its planner."""
        return {"load": self._load(model, targets), **self._decisions.get(model, {})}

    def _load(self, model: str, targets: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the load of the last minute; None before a second reading."""
        window = self._loads.get(model)
        figures = window.figures(targets or {}) if window else None
        return asdict(figures) if figures else None

    async def load_histories(self) -> list[dict[str, Any]]:
        """Read the load of the last hours from the frontends; empty while none answers."""
        answers = [await self._get(url + LOAD_HISTORY_PATH) for url in public_urls(self._listed.registered)]
        return [parse_object(answer) for answer in answers if answer]

    async def _get(self, url: str) -> bytes:
        """Return what a frontend answers; nothing when it does not."""
        self._http = self._http or HttpClient(tls=certificates.authorities(os.environ))
        try:
            return (await self._http.get(url, timeout_s=METRICS_TIMEOUT_S)).body
        except OSError:
            return b""

    def _tokens_per_s(self, worker: str, now_s: float, generated: int | None) -> float | None:
        """Return a worker's tokens per second since the last poll; None without one, or if the count fell."""
        before = self._tokens.pop(worker, None)
        if generated is None:
            return None
        self._tokens[worker] = (now_s, generated)
        if before is None or generated < before[1] or now_s <= before[0]:
            return None
        return (generated - before[1]) / (now_s - before[0])

    def _power(self, now_s: float) -> dict[str, dict[str, Any]]:
        """Return the power of each model, and of all together; empty when no GPU reports its power."""
        shown = self._gpus_shown.items()
        watts = watts_by_model(
            {index: row["watts"] for index, row in shown if row["watts"] is not None},
            self.found.workers,
            models_of_components(self._listed),
        )
        if not watts:
            return {}
        watts[ALL_MODELS] = sum(watts.values())
        of_all = {(f"{source} {model}", ALL_MODELS): n for (source, model), n in self._tokens_sent.items()}
        tokens = {**self._tokens_sent, **of_all}
        return {model: asdict(each) for model, each in self._meter.add(now_s, watts, tokens).items()}

    def _read_gpus(self) -> dict[int, dict[str, Any]]:
        uses, activity = self._read_uses(), self._read_activity()
        sessions = {worker.pid for worker in self.found.workers if worker.pid}
        rows: dict[int, dict[str, Any]] = {}
        for gpu in self._gpus:
            use, doing = uses.get(gpu.index), activity.get(gpu.index)
            others = [each for each in use.processes if _session(each.pid) not in sessions] if use else []
            rows[gpu.index] = {
                "used_bytes": use.used_bytes if use and (use.used_bytes or not gpu.is_simulated) else None,
                "utilisation": doing.utilisation if doing else None,
                "watts": doing.watts if doing else None,
                "others": [_described(each) for each in others if each.pid],
            }
        return rows


COMMAND_CHARACTERS = 60
"""The characters that are shown of another program's command line."""


def _described(process: GpuProcess) -> str:
    """Return ``alice: python train.py (4242)``, as far as the process can be inspected."""
    words = (command_line(process.pid) or b"").decode(errors="replace").split("\0")
    command = mask_secrets(" ".join(filter(None, words))) or process.name or "a process"
    shown = command if len(command) <= COMMAND_CHARACTERS else f"{command[:COMMAND_CHARACTERS]}..."
    return f"{user_of(process.uid)}{shown} ({process.pid})"


def user_of(uid: int) -> str:
    """Return ``alice: `` for a user's id; empty for one that is not known."""
    try:
        return f"{pwd.getpwuid(uid).pw_name}: " if uid >= 0 else ""
    except KeyError:
        return f"uid {uid}: "


def _session(pid: int) -> int:
    """Return the session of a process: that of an engine is its worker's; 0 when the process is gone."""
    try:
        return os.getsid(pid) if pid else 0
    except OSError:
        return 0


WINDOW_S = 60.0
"""The longest time between the two readings that are compared, in seconds."""

PERCENTILE = 95.0
"""Of TTFT and ITL, as they are shown where no target names another."""


NO_TARGETS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class LoadSummary:
    """The load of a deployment over the last ``window_s`` seconds, times in ms; None: nothing was counted.

    The times at the percentiles are read off histograms, so they are as exact as their buckets are narrow.
    """

    window_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft_mean_ms: float | None
    ttft_percentile_ms: float | None
    itl_mean_ms: float | None
    itl_percentile_ms: float | None


class LoadWindow:
    """The readings of the last minute."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, Counts]] = deque()

    def add(self, at_s: float, counts: Counts) -> None:
        """Add a reading; counts that fell are those of restarted frontends, and restart the window."""
        if self._readings and has_restarted(self._readings[-1][1], counts):
            self._readings.clear()
        self._readings.append((at_s, counts))
        while len(self._readings) > 2 and at_s - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()

    def figures(self, targets: Mapping[str, Any] = NO_TARGETS) -> LoadSummary | None:
        """Return the figures of the window; None before the second reading.

        ``targets``, in the form of a status document, name the percentiles.
        """
        if len(self._readings) < 2:
            return None
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        return summarize_load(increase(first, last), max(last_s - first_s, 1e-9), targets)


def summarize_load(
    seen: Mapping[Key, float], window_s: float, targets: Mapping[str, Any] = NO_TARGETS
) -> LoadSummary:
    """Return the load by the counters' increase in that time, TTFT and ITL at the targets' percentiles."""
    # Each token but the first of a stream is one observation of ITL, each first one of TTFT. An answer
    # without a stream has neither: its tokens are counted at its end, as those of streams are once more.
    streamed = seen.get((f"{TTFT}_count", ""), 0.0) + seen.get((f"{ITL}_count", ""), 0.0)
    return LoadSummary(
        window_s,
        seen.get((REQUESTS, ""), 0.0) / window_s,
        max(streamed, seen.get((f"{OSL}_sum", ""), 0.0)) / window_s,
        _mean_ms(seen, TTFT),
        percentile_ms(seen, TTFT, targets.get("ttft_percentile", PERCENTILE)),
        _mean_ms(seen, ITL),
        percentile_ms(seen, ITL, targets.get("itl_percentile", PERCENTILE)),
    )


def percentile_ms(seen: Mapping[Key, float], name: str, percentile: float) -> float | None:
    """Return the time at that percentile in ms; None when nothing was counted.

    Within a bucket times are taken to lie evenly, as by ``histogram_quantile`` of Prometheus; above the last
    bound it is that bound.
    """
    buckets = sorted((float(le), count) for (sample, le), count in seen.items() if sample == f"{name}_bucket")
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = buckets[-1][1] * percentile / 100
    below_s = below = 0.0
    for bound_s, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound_s):
                return 1000 * below_s
            return 1000 * (below_s + (bound_s - below_s) * (rank - below) / (count - below))
        below_s, below = bound_s, count
    return 1000 * below_s


def _mean_ms(seen: Mapping[Key, float], name: str) -> float | None:
    count = seen.get((f"{name}_count", ""), 0.0)
    return 1000 * seen.get((f"{name}_sum", ""), 0.0) / count if count > 0 else None
