"""A worker's metrics in Prometheus' text format, rendered by hand: the library would cost start-up time."""

from __future__ import annotations

from collections.abc import Mapping

from dynaplan.domain.worker_load import WorkerLoad

CONTENT_TYPE = "text/plain; version=0.0.4"

PREFIX = "dynamo_component_"


def load_gauges(load: WorkerLoad) -> dict[str, float]:
    """A worker's load under the names that Dynamo gives these gauges."""
    return {
        f"{PREFIX}request_active_slots": load.running_requests,
        f"{PREFIX}request_total_slots": load.request_slots,
        f"{PREFIX}num_requests_waiting": load.waiting_requests,
        f"{PREFIX}kvstats_active_blocks": load.kv_active_blocks,
        f"{PREFIX}kvstats_total_blocks": load.kv_total_blocks,
        f"{PREFIX}kvstats_gpu_cache_usage_percent": load.kv_usage,
        f"{PREFIX}kvstats_gpu_prefix_cache_hit_rate": load.prefix_hit_rate,
    }


def render(values: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """One sample per name, all with the same labels; a name that ends in ``_total`` is a counter."""
    written = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "".join(_sample(name, value, written) for name, value in values.items())


def _sample(name: str, value: float, labels: str) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    return f"# TYPE {name} {kind}\n{name}{{{labels}}} {value:.17g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
