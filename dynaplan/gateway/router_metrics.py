"""The frontend's metrics under the names of Dynamo's router: choices by prefix, and traffic.

``RouterMetrics`` observes each choice of a worker by what it has cached. ``RouterNames`` yields metrics of
the frontend once more under other names: Dynamo's planner reads the means of a namespace by these with
``throughput_metrics_source: router``; the label ``dynamo_namespace`` has ``_`` for ``-`` there. They are
computed when ``/metrics`` is read: counting each token twice would cost each token.

Source: ``traffic_metrics.py`` of Dynamo 1.2.1, which reads the first name from workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.registry import Collector

PREFIX = "dynamo_component_router_"
LABELS = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")

HIT_RATE = tuple(step / 20 for step in range(21))
BLOCKS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def router_namespace(namespace: str) -> str:
    """Return the namespace as Dynamo's router has it in its labels."""
    return namespace.replace("-", "_")


class RouterMetrics:
    """Observes each choice of a worker by what it has cached.

    ``kv_hit_rate`` is each request's own; ``overlap_blocks_total`` over ``prompt_blocks_total`` is the rate
    over all blocks, which is what prefill work depends on.
    """

    def __init__(self, namespace: str, component: str, registry: CollectorRegistry) -> None:
        labels = (router_namespace(namespace), component, "generate")

        def counter(name: str, about: str) -> Counter:
            return Counter(PREFIX + name, about, LABELS, registry=registry).labels(*labels)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, about, LABELS, registry=registry, buckets=buckets).labels(*labels)

        self._hit_rate = histogram("kv_hit_rate", "Part of a prompt that its worker had cached", HIT_RATE)
        self._lost = histogram(
            "overlap_blocks_lost", "Blocks that another worker had cached beyond the chosen one's", BLOCKS
        )
        self._non_max = counter(
            "non_max_overlap_selections", "Choices of a worker although another had cached more"
        )
        self._prompt_blocks = counter("prompt_blocks", "KV blocks of prompts")
        self._overlap_blocks = counter("overlap_blocks", "KV blocks of prompts that their worker had cached")

    def observe_choice(self, prompt_blocks: int, overlap_blocks: int, max_blocks: int) -> None:
        """Observe a choice: the blocks of the prompt, those cached by the worker, the most that any had."""
        if not prompt_blocks:
            return
        self._hit_rate.observe(overlap_blocks / prompt_blocks)
        self._lost.observe(max_blocks - overlap_blocks)
        self._prompt_blocks.inc(prompt_blocks)
        self._overlap_blocks.inc(overlap_blocks)
        if overlap_blocks < max_blocks:
            self._non_max.inc()


COMPONENT = "dynamo_component_"

NAMES = {
    "request_duration_seconds": "request_duration_seconds",
    **{
        name: f"router_{name}"
        for name in (
            "requests",
            "requests_started",
            "time_to_first_token_seconds",
            "inter_token_latency_seconds",
            "input_sequence_tokens",
            "output_sequence_tokens",
        )
    },
}
"""The ends of the frontend's names, and of the other ones."""

KEPT_LABELS = ("le",)
"""Labels that stay beside the namespace; all others are summed over."""


class RouterNames(Collector):
    """Yields the metrics that ``collect`` returns, and sums of some under the names of Dynamo's router."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], prefix: str) -> None:
        self._collect = collect
        self._names = {f"{prefix}_{ours}": COMPONENT + theirs for ours, theirs in NAMES.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, and those in ``NAMES`` once more under their other name."""
        for metric in self._collect():
            yield metric
            if metric.name in self._names:
                yield _rename(metric, self._names[metric.name])


def _rename(metric: Metric, name: str) -> Metric:
    """Return the metric as ``name``, its samples summed over all labels but namespace and ``KEPT_LABELS``."""
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in metric.samples:
        kept = {key: sample.labels[key] for key in KEPT_LABELS if key in sample.labels}
        namespace = router_namespace(sample.labels["dynamo_namespace"])
        labels = {"dynamo_namespace": namespace, **kept}
        key = name + sample.name.removeprefix(metric.name), tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    renamed = Metric(name, metric.documentation, metric.type)
    for (sample_name, items), value in sums.items():
        renamed.add_sample(sample_name, dict(items), value)
    return renamed
