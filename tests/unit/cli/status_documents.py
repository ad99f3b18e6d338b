"""Documents as ``status`` gathers them, for the tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from dynaplan.cli.models_view import model_rows
from dynaplan.contract.model_keys import ModelReport

FIGURES = {
    "window_s": 60.0,
    "requests_per_s": 7.25,
    "tokens_per_s": 431.6,
    "ttft_mean_ms": 52.94,
    "ttft_percentile_ms": 96.3,
    "itl_mean_ms": 4.48,
    "itl_percentile_ms": None,
}


def worker_document(name: str = "dynamo_VllmWorker", **more: Any) -> dict[str, Any]:
    return {
        "worker": name,
        "component": "VllmWorker",
        "role": "decode",
        "state": "ready",
        "loading_s": None,
        "usually_s": None,
        "draining_s": None,
        "gpus": [0],
        "pid": 7,
        "is_alive": True,
        "running": 1,
        "waiting": 0,
        "kv_usage": 0.25,
        "kv_pressure": 0.25,
        "uptime_s": 61.0,
        "restarts": 2,
        "waits": "",
        "reason": "",
        "is_managed": True,
        **more,
    }


def model_document(**more: Any) -> dict[str, Any]:
    """A model that is loaded on request, as ``status --json`` has it."""
    return {**model_rows({"": ModelReport("", "ready")}, {})[""], **more}


def gpu_document(index: int, workers: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    row = {"index": index, "name": "H100", "memory_bytes": 80 * 2**30, "workers": list(workers)}
    return row | {"used_bytes": 0, "utilisation": None, "watts": None, "others": []} | more


def document(*workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "namespace": "dynamo",
        "frontend_url": "http://127.0.0.1:8000",
        "metrics_url": "http://127.0.0.1:8000/metrics",
        "log_dir": "/srv/logs",
        "logs_at": "~/logs",
        "serve_pid": 5,
        "models": ["llama"],
        "policy": "load",
        "targets": None,
        "desired": {"decode": 2},
        "is_pending": True,
        "workers": list(workers) or [worker_document()],
        "gpus": [],
        "free_gpus": [1, 2],
        "waits": {},
        "holds": {},
        "troubles": [],
        "ignored_keys": {},
        "not_callable": {},
        "routing": {},
        **more,
    }
