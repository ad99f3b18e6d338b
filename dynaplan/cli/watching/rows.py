"""Rows of ``dynaplan status``: the JSON form of each worker, also of one that no ``serve`` has started."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaplan.engines.worker_load import WorkerLoad
    from dynaplan.graph.lifecycle import Worker
    from dynaplan.store.instances import Instance

ENGINE_ROLES = ("decode", "prefill")


def worker_row(
    worker: Worker, load: WorkerLoad | None, usually_s: float | None, waits: str = ""
) -> dict[str, Any]:
    """Return the JSON form of one worker; ``waits`` says why it does not start yet.

    A worker without a registration is loading its engine, unless it has been registered before: its URL is
    known then.
    """
    since_s = round(time.monotonic() - worker.since_s, 3)
    is_loading = (
        not waits
        and worker.state.value == "starting"
        and worker.role.value in ENGINE_ROLES
        and not worker.url
    )
    return {
        "worker": worker.name,
        "component": worker.component,
        "role": worker.role.value,
        "state": "asleep" if load and load.is_asleep else worker.state.value,
        "loading_s": since_s if is_loading else None,
        "usually_s": usually_s if is_loading else None,
        "draining_s": since_s if worker.state.value == "draining" else None,
        "gpus": list(worker.gpus),
        "pid": worker.pid,
        "is_alive": _is_alive(worker),
        "running": load.running_requests if load else None,
        "waiting": load.waiting_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "uptime_s": uptime_s(worker.started_at),
        "restarts": len(worker.restarts_s),
        "waits": waits,
        "reason": worker.reason,
        "is_managed": True,
    }


def alone_row(instance: Instance, load: WorkerLoad | None) -> dict[str, Any]:
    """Return the JSON form of a component by its registration; it has the keys of a managed worker's."""
    return {
        "worker": instance.worker,
        "component": instance.component,
        "role": str(instance.card.get("role") or "service"),
        "state": "asleep" if load and load.is_asleep else "ready",
        "loading_s": None,
        "usually_s": None,
        "draining_s": None,
        "gpus": list(instance.card.get("gpus", ())),
        "pid": instance.pid,
        "is_alive": None,
        "running": load.running_requests if load else None,
        "waiting": load.waiting_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "uptime_s": _uptime_of(instance),
        "restarts": 0,
        "waits": "",
        "reason": "",
        "is_managed": instance.is_managed,
        "host": instance.host,
    }


def out_of_reach(instances: Iterable[Instance]) -> list[str]:
    """Return a sentence when prompts are computed by decode workers that prefill workers cannot reach."""
    by_role: dict[object, list[Instance]] = {}
    for each in instances:
        by_role.setdefault(each.card.get("role"), []).append(each)
    alone = [
        decode.worker
        for decode in by_role.get("decode", ())
        if not all(prefill.can_hand_over_to(decode) for prefill in by_role.get("prefill", ()))
    ]
    if not alone:
        return []
    return [
        f"{', '.join(alone)} computes prompts itself: prefill workers on another host cannot hand KV entries "
        "over. vLLM's can, with kv-network and --advertise-host on both sides."
    ]


def uptime_s(started_at: int) -> float | None:
    """Return the seconds since a process began; ``started_at`` is in clock ticks since boot."""
    if not started_at:
        return None
    return float(time.clock_gettime(time.CLOCK_BOOTTIME) - started_at / os.sysconf("SC_CLK_TCK"))


def is_lost(row: Mapping[str, Any]) -> bool:
    """Tell whether the worker was registered once and has lost its registration."""
    is_starting = row["state"] == "starting" and not row["waits"]
    return is_starting and row["role"] in ENGINE_ROLES and row["loading_s"] is None


def _is_alive(worker: Worker) -> bool | None:
    """Tell whether the worker's process runs; None for a worker that has none."""
    from dynaplan.process import process_table

    return process_table.identify(worker.pid) == worker.started_at if worker.pid else None


def _uptime_of(instance: Instance) -> float | None:
    """Return the age of its process, which is known on its own host only."""
    from dynaplan.process import process_table

    if instance.network != process_table.network():
        return None
    return uptime_s(process_table.identify(instance.pid) or 0)
