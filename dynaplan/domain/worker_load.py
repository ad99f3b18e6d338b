"""What one worker says about its load, in the wire format of ``GET /load_metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerLoad:
    """The load of one worker at one moment.

    ``kv_usage`` and ``prefix_hit_rate`` are fractions from 0 to 1; the rest are counts. The wire
    form is the nested ``worker_stats``/``kv_stats`` JSON of Dynamo 0.3.2; the flat form of 0.2.0 is read too.
    """

    running_requests: int = 0
    request_slots: int = 0
    waiting_requests: int = 0
    kv_active_blocks: int = 0
    kv_total_blocks: int = 0
    kv_usage: float = 0.0
    prefix_hit_rate: float = 0.0

    def to_json(self) -> dict[str, dict[str, float]]:
        """The nested JSON of ``/load_metrics``."""
        return {
            "worker_stats": {
                "request_active_slots": self.running_requests,
                "request_total_slots": self.request_slots,
                "num_requests_waiting": self.waiting_requests,
            },
            "kv_stats": {
                "kv_active_blocks": self.kv_active_blocks,
                "kv_total_blocks": self.kv_total_blocks,
                "gpu_cache_usage_perc": self.kv_usage,
                "gpu_prefix_cache_hit_rate": self.prefix_hit_rate,
            },
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> WorkerLoad:
        """Read the nested or the flat form; a missing field is 0."""
        flat = {**document, **document.get("worker_stats", {}), **document.get("kv_stats", {})}
        return cls(
            running_requests=int(flat.get("request_active_slots", 0)),
            request_slots=int(flat.get("request_total_slots", 0)),
            waiting_requests=int(flat.get("num_requests_waiting", 0)),
            kv_active_blocks=int(flat.get("kv_active_blocks", 0)),
            kv_total_blocks=int(flat.get("kv_total_blocks", 0)),
            kv_usage=float(flat.get("gpu_cache_usage_perc", 0.0)),
            prefix_hit_rate=float(flat.get("gpu_prefix_cache_hit_rate", 0.0)),
        )
