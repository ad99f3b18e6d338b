"""The Frontend's metrics: names, labels and buckets of Dynamo 1.6.1's frontend, plus ``dynamo_namespace``.

Several frontends on one port share a directory: each keeps its numbers in a file there, ``/metrics`` of
any of them adds them up, and those of a killed one stay in the sum (``prometheus_client``'s multiprocess
mode).
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    values,
)
from prometheus_client.multiprocess import mark_process_dead
from prometheus_client.utils import floatToGoString

from dynaplan.contract.traffic import INPUT_TOKENS, OUTPUT_TOKENS
from dynaplan.gateway.engine_answers import NO_USAGE, Usage
from dynaplan.gateway.keys.usage import KeyUsage
from dynaplan.gateway.load_history import LatencyCounts, LoadCounts, LoadHistory
from dynaplan.gateway.metrics_text import SharedFiles, exposition_text
from dynaplan.gateway.router_metrics import RouterMetrics, RouterNames

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The buckets are Dynamo's, so that its dashboards and its planner read ours.
DURATION_S = (0, 2, 4, 8, 16, 32, 64, 130, 260, 510)
TTFT_S = (0, 0.0022, 0.0047, 0.01, 0.022, 0.047, 0.1, 0.22, 0.47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480)
ITL_S = (
    *(0, 0.0018, 0.0033, 0.0059, 0.011, 0.02, 0.035, 0.064, 0.12, 0.21),
    *(0.38, 0.69, 1.2, 2.3, 4.1, 7.4, 13, 24, 44, 80),
)


TARGET = ("model", "target_ms")
"""The labels of the counters of missed promises: the promised time belongs to them, since it may change."""

WRITE_INTERVAL_S = 0.5
"""Time for which observations are gathered at most, where other frontends render them, too.

To write them for each request costs as much as all else that is counted of it.
"""


class _GatheredHistogram:
    """A histogram whose observations are gathered here, and written when they are to be read.

    An observation of ``prometheus_client``'s own takes as long as all else that is done with a token, and it
    has no way to add several: its buckets and its sum are reached by their private names.
    """

    def __init__(self, child: Histogram) -> None:
        self._child = child
        self.bounds = child._upper_bounds
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, amount: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, amount)] += times
        self.sum += amount * times

    def write(self) -> None:
        counts, self.counts = self.counts, [0] * len(self.bounds)
        for bucket, count in zip(self._child._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        if self.sum:
            self._child._sum.inc(self.sum)
            self.sum = 0.0


class _ModelMetrics:
    """The metrics of one model, labelled once: looking labels up costs more than an observation."""

    def __init__(self, metrics: FrontendMetrics, model: str) -> None:
        labels = (metrics.namespace, model)
        self._inflight_gauges = metrics.inflight.labels(*labels), metrics.active.labels(*labels)
        self._queued_gauge = metrics.queued.labels(*labels)
        self.inflight = self.queued = 0
        self.duration_s = _GatheredHistogram(metrics.duration_s.labels(*labels))
        self.input_tokens = _GatheredHistogram(metrics.input_tokens.labels(*labels))
        self.output_tokens = _GatheredHistogram(metrics.output_tokens.labels(*labels))
        self.cached_tokens = _GatheredHistogram(metrics.cached_tokens.labels(*labels))
        metrics.output_tokens_total.labels(*labels)  # exported from now on
        self.migrations = metrics.migrations.labels(*labels, "ongoing_request")
        self.ttft_s = _GatheredHistogram(metrics.ttft_s.labels(*labels))
        self.itl_s = _GatheredHistogram(metrics.itl_s.labels(*labels))
        self.ttft_over_s = self.itl_over_s = math.inf
        if promised := metrics.promised_by_model.get(model, metrics.promised_ms):
            # A child is exported from its making on: no miss is seen as 0, not as unknown.
            self.ttft_over_s, self.itl_over_s = (each / 1000 for each in promised)
            self.over_ttft = metrics.over_ttft.labels(*labels, str(promised[0]))
            self.over_itl = metrics.over_itl.labels(*labels, str(promised[1]))

    def write(self) -> None:
        """Write what is only counted between two renderings."""
        histograms = self.duration_s, self.input_tokens, self.output_tokens, self.cached_tokens
        for histogram in (*histograms, self.ttft_s, self.itl_s):
            histogram.write()
        for gauge in self._inflight_gauges:
            gauge.set(self.inflight)
        self._queued_gauge.set(self.queued)


class _RequestCounts:
    """The numbers of requests of one model, endpoint and type, written when they are to be read.

    Where other frontends read them, that is at once: a frontend that is killed loses none.
    """

    def __init__(self, metrics: FrontendMetrics, *labels: str) -> None:
        self._metrics = metrics
        self._labels = (metrics.namespace, *labels)
        # Labelled once, as those of a model are.
        self._started_total = metrics.started_total.labels(*self._labels)
        self._output_tokens_total = metrics.output_tokens_total.labels(*self._labels[:2])
        self._ended_totals: dict[str, Counter] = {}
        self.started = self.output_tokens = 0
        self.ended: defaultdict[str, int] = defaultdict(int)
        """Error type, empty for success -> requests that have ended so."""

    def write(self) -> None:
        if self.started:
            self._started_total.inc(self.started)
            self.started = 0
        if self.output_tokens:
            self._output_tokens_total.inc(self.output_tokens)
            self.output_tokens = 0
        for error_type, count in self.ended.items():
            self._ended_total(error_type).inc(count)
        self.ended.clear()

    def _ended_total(self, error_type: str) -> Counter:
        known = self._ended_totals.get(error_type)
        if known is None:
            labels = (*self._labels, "error" if error_type else "success", error_type)
            known = self._ended_totals[error_type] = self._metrics.ended_total.labels(*labels)
        return known


class RequestRecord:
    """Observes one request from its acceptance, at ``begun_s``, until ``finish``.

    ``output_tokens`` is the number of tokens that its stream has brought, ``ttft_s`` the time to the first
    of them.
    """

    __slots__ = (
        *("_counts", "_last_s", "_metrics", "_now_s", "_of_model", "begun_s", "is_waiting", "output_tokens"),
        "ttft_s",
    )

    def __init__(self, metrics: FrontendMetrics, model: str, endpoint: str, is_stream: bool) -> None:
        self._metrics = metrics
        self._now_s = metrics.now_s
        self._counts = metrics.counts_of(model, endpoint, is_stream)
        self._of_model = metrics.of_model(model)
        self.begun_s = self._last_s = self._now_s()
        self.output_tokens = 0
        self.ttft_s: float | None = None
        self.is_waiting = True
        self._counts.started += 1
        self._of_model.inflight += 1
        self._of_model.queued += 1
        metrics.note_change(self.begun_s, self._counts)

    def begin_answer(self) -> None:
        """Count the request as answering instead of queued: the first token has arrived."""
        if self.is_waiting:
            self.is_waiting = False
            self._of_model.queued -= 1

    def observe(self, tokens: int) -> int:
        """Observe TTFT or ITL for the stream's next tokens; return the number that it has brought so far.

        An engine may send several tokens at once: the time since the previous ones is spread over them
        evenly.
        """
        if not tokens:
            return self.output_tokens
        now_s, of_model = self._now_s(), self._of_model
        if self.output_tokens:
            itl_s, gap_s = of_model.itl_s, (now_s - self._last_s) / tokens
            itl_s.counts[bisect_left(itl_s.bounds, gap_s)] += tokens  # in place: it is done for every token
            itl_s.sum += gap_s * tokens
        else:
            self.ttft_s = now_s - self.begun_s
            of_model.ttft_s.observe(self.ttft_s)
            if self.ttft_s > of_model.ttft_over_s:
                of_model.over_ttft.inc()
            if tokens > 1:
                of_model.itl_s.observe(0.0, tokens - 1)
        self._last_s = now_s
        self.output_tokens += tokens
        return self.output_tokens

    def count_migration(self) -> None:
        self._of_model.migrations.inc()

    def finish(self, error_type: str, input_tokens: int, stated: Usage = NO_USAGE) -> None:
        """Observe the end of the request; ``error_type`` is empty when it was answered.

        The usage that the answer ``stated`` is exact and replaces the estimate ``input_tokens``.
        """
        now_s, of_model = self._now_s(), self._of_model
        if self.is_waiting:
            self.begin_answer()
        of_model.inflight -= 1
        of_model.duration_s.observe(now_s - self.begun_s)
        itl_over_s = of_model.itl_over_s
        if self.output_tokens > 1 and itl_over_s < math.inf and self._mean_itl_s() > itl_over_s:
            of_model.over_itl.inc()
        output_tokens = self.output_tokens if stated.output_tokens is None else stated.output_tokens
        if not error_type:
            of_model.input_tokens.observe(
                input_tokens if stated.input_tokens is None else stated.input_tokens
            )
            of_model.output_tokens.observe(output_tokens)
            if stated.cached_tokens is not None:
                of_model.cached_tokens.observe(stated.cached_tokens)
        self._counts.output_tokens += output_tokens
        self._counts.ended[error_type] += 1
        self._metrics.note_change(now_s, self._counts)

    def _mean_itl_s(self) -> float:
        """Return the seconds between two of the tokens that have arrived, on average."""
        first_s = self.begun_s + (self.ttft_s or 0.0)
        return (self._last_s - first_s) / (self.output_tokens - 1)


class FrontendMetrics:
    """Every metric of one frontend process. ``now_s`` is monotonic.

    ``shared`` is the directory of the frontends on one port, for which ``call_later``, the event loop's, has
    the counts written; None for one that is alone.
    ``routed_by_prefix`` is the component whose workers are chosen by their caches, if any. ``promised_ms``
    are the TTFT and the mean ITL that are promised to a request, of which the misses are counted; None where
    nothing is. ``promised_by_model`` has those of models with a promise of their own. ``has_keys``: requests
    are counted by key, too.
    """

    def __init__(
        self,
        namespace: str,
        now_s: Callable[[], float],
        shared: Path | None = None,
        routed_by_prefix: str = "",
        promised_ms: tuple[float, float] | None = None,
        call_later: Callable[[float, Callable[[], None]], object] | None = None,
        promised_by_model: Mapping[str, tuple[float, float]] | None = None,
        *,
        has_keys: bool = False,
    ) -> None:
        self.namespace = namespace
        self.promised_ms = promised_ms
        self.promised_by_model = promised_by_model or {}
        self.now_s = now_s
        self.is_shared = shared is not None
        self._call_later = call_later
        self._is_write_due = False
        if shared:
            _share_files(shared)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # Dynamo has no such samples
        self._registry = CollectorRegistry()
        self._define_requests()
        self._define_histograms()
        self._define_models()
        if has_keys:
            self._define_keys()
        self.router = RouterMetrics(namespace, routed_by_prefix, self._registry) if routed_by_prefix else None
        about = {metric.name: metric.documentation for metric in self._registry.collect()}
        self._files = SharedFiles(shared, about) if shared else None
        self._models: dict[str, _ModelMetrics] = {}
        self._placed: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._counts: dict[tuple[str, str, bool], _RequestCounts] = {}
        self.key_usage: KeyUsage | None = None
        self.history = LoadHistory(self._read_load, now_s)

    def record(self, model: str, endpoint: str, is_stream: bool) -> RequestRecord:
        return RequestRecord(self, model, endpoint, is_stream)

    def count_refusal(
        self, endpoint: str, error_type: str, model: str = "unknown", is_stream: bool = False
    ) -> None:
        """Count a request that was answered with an error before it was accepted."""
        counts = self.counts_of(model, endpoint, is_stream)
        counts.ended[error_type] += 1
        self.note_change(self.now_s(), counts)

    def count_disconnect(self) -> None:
        """Count a client that closed its connection before its answer was complete."""
        self._disconnected.labels(self.namespace).inc()

    def count_closed_connection(self, reason: str) -> None:
        """Count a client's connection that was closed, or refused, because of a limit."""
        self._closed_connections.labels(self.namespace, reason).inc()

    def count_prefill(self, model: str, place: str) -> None:
        """Count a prefill by place: ``remote``, ``local``, or ``fallback`` (meant remote, became local)."""
        self._placed[model, place] += 1

    def describe_model(self, model: str, is_ready: bool, card: Mapping[str, object]) -> None:
        """Set a model's gauges from the card that a worker has registered."""
        self._model_ready.labels(self.namespace, model).set(is_ready)
        for gauge, key in ((self._context, "context_tokens"), (self._block, "kv_block_tokens")):
            value = card.get(key)
            if isinstance(value, int):
                gauge.labels(self.namespace, model).set(value)

    def write_soon(self) -> None:
        """Write what is gathered in a moment, for the other frontends, and again while there are requests."""
        if self._call_later and not self._is_write_due:
            self._is_write_due = True
            self._call_later(WRITE_INTERVAL_S, self._write_due)

    def _write_due(self) -> None:
        self._is_write_due = False
        self.write()
        if any(each.inflight for each in self._models.values()):
            self.write_soon()

    def write(self) -> None:
        """Write what is only counted between two renderings."""
        for of_model in self._models.values():
            of_model.write()
        for counts in self._counts.values():
            counts.write()
        if self.key_usage:
            self.key_usage.write()
        for (model, place), count in self._placed.items():
            self._prefills.labels(self.namespace, model, place).inc(count)
        self._placed.clear()

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format; those of all frontends that share the directory."""
        self.write()
        collect = self._registry.collect
        if self._files:
            _forget_dead_gauges(self._files.directory)
            collect = self._files.collect
        return exposition_text(RouterNames(collect, _prefix()).collect())

    def render_history(self) -> bytes:
        """Return the load of the last hours as JSON; that of all frontends that share the directory."""
        document = self.history.to_json({"ttft": TTFT_S, "itl": ITL_S})
        return msgspec.json.encode(document)

    def _read_load(self) -> LoadCounts:
        self.write()
        if self._files:
            return _load_in(self._files.collect())
        own = (self.ended_total, self.output_tokens_total, self.ttft_s, self.itl_s)
        return _load_in(metric for each in own for metric in each.collect())

    def of_model(self, model: str) -> _ModelMetrics:
        """Return the labelled metrics of that model, made at the first call."""
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = _ModelMetrics(self, model)
        return known

    def counts_of(self, model: str, endpoint: str, is_stream: bool) -> _RequestCounts:
        """Return the numbers of such requests."""
        known = self._counts.get((model, endpoint, is_stream))
        if known is None:
            known = _RequestCounts(self, model, endpoint, "stream" if is_stream else "unary")
            self._counts[model, endpoint, is_stream] = known
        return known

    def note_change(self, now_s: float, counts: _RequestCounts) -> None:
        """Keep the history, and what other frontends read, up to date: a request has begun, or ended."""
        if self.is_shared:
            counts.write()
            self.write_soon()
        if now_s >= self.history.due_s:
            self.history.update()

    def _define_requests(self) -> None:
        request = ("model", "endpoint", "request_type")
        self.ended_total = self._counter("requests", "Requests that ended", *request, "status", "error_type")
        self.started_total = self._counter("requests_started", "Requests that were accepted", *request)
        self.output_tokens_total = self._counter("output_tokens", "Tokens sent to clients", "model")
        self._prefills = self._counter(
            "prefills", "Prefills by the place they were computed", "model", "place"
        )
        self.migrations = self._counter(
            "model_migration", "Answers that went on at another worker", "model", "migration_type"
        )
        self.over_ttft = self._counter(
            "requests_over_ttft", "Requests whose first token came after the promised time", *TARGET
        )
        self.over_itl = self._counter(
            "requests_over_itl", "Answers whose mean time between tokens was over the promised one", *TARGET
        )
        self._disconnected = self._gauge(
            "disconnected_clients", "Clients that left before their answer's end"
        )
        self._closed_connections = self._counter(
            "closed_connections", "Connections closed or refused because of a limit", "reason"
        )
        self.inflight = self._gauge("inflight_requests", "Requests accepted and not ended", "model")
        self.active = self._gauge("active_requests", "Requests accepted and not ended", "model")
        self.queued = self._gauge("queued_requests", "Requests without a first byte of their answer", "model")

    def _define_keys(self) -> None:
        self.key_requests = self._counter(
            "key_requests", "Requests that ended, by the name of their key", "key", "model", "status"
        )
        self.key_tokens = self._counter(
            "key_tokens", "Tokens of prompts and of answers, by the name of their key", "key", "model", "type"
        )

    def _define_histograms(self) -> None:
        self.duration_s = self._histogram(
            "request_duration_seconds", "Time from acceptance of a request to its end", DURATION_S
        )
        self.input_tokens = self._histogram(
            "input_sequence_tokens", "Length of prompts, tokens", INPUT_TOKENS
        )
        self.output_tokens = self._histogram(
            "output_sequence_tokens", "Length of answers, tokens", OUTPUT_TOKENS
        )
        self.cached_tokens = self._histogram(
            "cached_tokens", "Tokens of prompts whose KV entries were there already", INPUT_TOKENS
        )
        self.ttft_s = self._histogram(
            "time_to_first_token_seconds", "Time from acceptance of a request to its first token", TTFT_S
        )
        self.itl_s = self._histogram(
            "inter_token_latency_seconds", "Time between two tokens of an answer", ITL_S
        )

    def _define_models(self) -> None:
        self._model_ready = self._gauge(
            "model_ready", "1 when a worker serves the model, else 0", "model", mode="livemax"
        )
        self._context = self._gauge(
            "model_context_length", "Longest context of the model, tokens", "model", mode="livemax"
        )
        self._block = self._gauge(
            "model_kv_cache_block_size", "Tokens of one KV block", "model", mode="livemax"
        )

    def _counter(self, name: str, about: str, *labels: str) -> Counter:
        return Counter(_name(name), about, ("dynamo_namespace", *labels), registry=self._registry)

    def _gauge(self, name: str, about: str, *labels: str, mode: str = "livesum") -> Gauge:
        return Gauge(
            _name(name),
            about,
            ("dynamo_namespace", *labels),
            registry=self._registry,
            multiprocess_mode=mode,  # type: ignore[arg-type]
        )

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            _name(name), about, ("dynamo_namespace", "model"), registry=self._registry, buckets=buckets
        )


def _load_in(metrics: Iterable[Metric]) -> LoadCounts:
    """Return the load in these metrics: that of all models together, and the sums of each."""
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    by_model: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for metric in metrics:
        for sample in metric.samples:
            sums[sample.name, sample.labels.get("le", "")] += sample.value
            by_model[sample.labels.get("model", "")][sample.name] += sample.value
    requests_total, tokens_total = _name("requests_total"), _name("output_tokens_total")

    def latency(name: str, bounds_s: Sequence[float]) -> LatencyCounts:
        bounds = [floatToGoString(bound) for bound in (*bounds_s, math.inf)]  # type: ignore[no-untyped-call]
        cumulative = [sums[f"{name}_bucket", bound] for bound in bounds]
        counts = (now - before for before, now in pairwise((0.0, *cumulative)))
        return LatencyCounts(tuple(counts), sums[f"{name}_sum", ""])

    return LoadCounts(
        sums[requests_total, ""],
        sums[tokens_total, ""],
        latency(_name("time_to_first_token_seconds"), TTFT_S),
        latency(_name("inter_token_latency_seconds"), ITL_S),
        {model: (own[requests_total], own[tokens_total]) for model, own in by_model.items()},
    )


def _name(name: str) -> str:
    return f"{_prefix()}_{name}"


def _prefix() -> str:
    return os.environ.get("DYN_METRICS_PREFIX") or "dynamo_frontend"


def _share_files(directory: Path) -> None:
    """Keep every metric made from now on in files of that directory.

    ``prometheus_client`` reads the variable when it is imported, which has happened already: so the class
    that it chose then is chosen again.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(directory)
    values.ValueClass = values.get_value_class()  # type: ignore[no-untyped-call]


def _forget_dead_gauges(directory: Path) -> None:
    """Remove the gauges of frontends that were killed; their counters stay in the sum."""
    for file in directory.glob("gauge_live*_*.db"):
        pid = int(file.stem.rpartition("_")[2])
        if not Path(f"/proc/{pid}").exists():
            mark_process_dead(pid, str(directory))  # type: ignore[no-untyped-call]
