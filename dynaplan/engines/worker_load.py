"""The load of one worker, in the wire format of ``GET /load_metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.config.settings.planner import (
    KV_USAGE_PER_WAITING_REQUEST,
)
from dynaplan.engines.engine_counters import EngineCounters
from dynaplan.util.documents import flag_field, number_field, object_field


@dataclass(frozen=True)
class WorkerLoad:
    """The load of one worker at one moment; an engine that ``is_asleep`` takes no request.

    ``kv_usage`` and ``prefix_hit_rate`` are fractions from 0 to 1; the rest are counts, ``generated_tokens``
    since the engine's start, 0 where it does not tell them. ``counters`` are those of its steps. The wire
    form is the nested ``worker_stats``/``kv_stats`` JSON of Dynamo 0.3.2; the flat form of 0.2.0 is read too.
    """

    running_requests: int = 0
    request_slots: int = 0
    waiting_requests: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    kv_usage: float = 0.0
    prefix_hit_rate: float = 0.0
    is_asleep: bool = False
    generated_tokens: int = 0
    counters: EngineCounters | None = None

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the nested JSON of ``/load_metrics``."""
        return {
            "worker_stats": {
                "request_active_slots": self.running_requests,
                "request_total_slots": self.request_slots,
                "num_requests_waiting": self.waiting_requests,
                **({"is_asleep": True} if self.is_asleep else {}),
                **({"generated_tokens": self.generated_tokens} if self.generated_tokens else {}),
            },
            "kv_stats": {
                "kv_active_blocks": self.kv_active_blocks,
                "kv_total_blocks": self.kv_total_blocks,
                "gpu_cache_usage_perc": self.kv_usage,
                "gpu_prefix_cache_hit_rate": self.prefix_hit_rate,
            },
            **({"step_stats": self.counters.to_json()} if self.counters else {}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> WorkerLoad:
        """Read the nested or the flat form; a missing field is 0. Raises ValueError, and nothing else."""
        nested = [object_field(document, name, {}) for name in ("worker_stats", "kv_stats")]
        flat = {**document, **nested[0], **nested[1]}

        counters = object_field(document, "step_stats", {})

        def number(name: str) -> float:
            return number_field(flat, name, 0)

        return cls(
            running_requests=int(number("request_active_slots")),
            request_slots=int(number("request_total_slots")),
            waiting_requests=int(number("num_requests_waiting")),
            kv_active_blocks=int(number("kv_active_blocks")),
            kv_total_blocks=int(number("kv_total_blocks")),
            kv_usage=number("gpu_cache_usage_perc"),
            prefix_hit_rate=number("gpu_prefix_cache_hit_rate"),
            is_asleep=flag_field(flat, "is_asleep", False),
            generated_tokens=int(number("generated_tokens")),
            counters=EngineCounters.from_json(counters) if counters else None,
        )


def kv_pressure(load: WorkerLoad) -> float:
    """Return a worker's KV usage plus 0.02 for each waiting request, once it runs any; may exceed 1.

    One whose request slots all run while others wait is full, however empty its KV cache is: llama.cpp has
    few slots.
    """
    if not load.running_requests or not load.waiting_requests:
        return load.kv_usage
    is_full = 0 < load.request_slots <= load.running_requests
    return (1.0 if is_full else load.kv_usage) + KV_USAGE_PER_WAITING_REQUEST * load.waiting_requests


GAUGE_PREFIX = "dynamo_component_"
"""The beginning of the names of the metrics of a worker, as Dynamo has them."""


def load_gauges(load: WorkerLoad) -> dict[str, float]:
    """A worker's load under the names that Dynamo gives these gauges."""
    return {
        f"{GAUGE_PREFIX}request_active_slots": load.running_requests,
        f"{GAUGE_PREFIX}request_total_slots": load.request_slots,
        f"{GAUGE_PREFIX}num_requests_waiting": load.waiting_requests,
        f"{GAUGE_PREFIX}kvstats_active_blocks": load.kv_active_blocks,
        f"{GAUGE_PREFIX}kvstats_total_blocks": load.kv_total_blocks,
        f"{GAUGE_PREFIX}kvstats_gpu_cache_usage_percent": load.kv_usage,
        f"{GAUGE_PREFIX}kvstats_gpu_prefix_cache_hit_rate": load.prefix_hit_rate,
    }
