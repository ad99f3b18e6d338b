"""The frontend's metrics under the names of Dynamo's router.

Dynamo's planner reads the means of a namespace by these names with ``throughput_metrics_source: router``; the
label ``dynamo_namespace`` has ``_`` for ``-`` there. They are computed when ``/metrics`` is read: counting
each token twice would cost each token.

Source: ``traffic_metrics.py`` of Dynamo 1.2.1, which reads the first name from workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from dynaplan.gateway.routing.router_metrics import router_namespace

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
    """Yields what ``collect`` does, and the sums of its metrics under the other names."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], prefix: str) -> None:
        self._collect = collect
        self._names = {f"{prefix}_{ours}": COMPONENT + theirs for ours, theirs in NAMES.items()}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, and the named ones once more."""
        for metric in self._collect():
            yield metric
            if metric.name in self._names:
                yield _renamed(metric, self._names[metric.name])


def _renamed(metric: Metric, name: str) -> Metric:
    """Return the sums of the metric's samples for each namespace."""
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
