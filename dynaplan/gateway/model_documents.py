"""The documents by which clients follow and move models: llama.cpp's router mode, and llama-swap.

| path | of | answer |
|---|---|---|
| ``GET /models``, ``/v1/models`` | llama.cpp, llama-swap | entries of models with ``status.value`` |
| ``POST /models/load``, ``/models/unload`` | llama.cpp | ``{"success": true}`` at once, not when it is done |
| ``GET /models/sse`` | llama.cpp | an event for each change: ``{"model", "event", "data"}`` |
| ``GET /running`` | llama-swap | the models that have a worker |
| ``GET /unload``, ``POST /api/models/unload[/MODEL]`` | llama-swap | text ``OK`` |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dynaplan.models.model import ModelState, ModelStatus

LLAMA_CPP_STATUS: Mapping[ModelState, str] = {
    ModelState.UNLOADED: "unloaded",
    ModelState.LOADING: "loading",
    ModelState.READY: "loaded",
    ModelState.DRAINING: "loaded",
    ModelState.ASLEEP: "sleeping",
    ModelState.FAILED: "unloaded",
}
"""llama.cpp's words. A draining model still answers; a failed one is unloaded, and says so beside it."""

LLAMA_SWAP_STATE: Mapping[ModelState, str] = {
    ModelState.LOADING: "starting",
    ModelState.READY: "ready",
    ModelState.DRAINING: "stopping",
    ModelState.ASLEEP: "stopped",
}
"""llama-swap's words for models that have a worker."""

STATUS_CHANGE = "status_change"


def status_document(status: ModelStatus) -> dict[str, Any]:
    """Return llama.cpp's ``status`` of a model."""
    document: dict[str, Any] = {"value": LLAMA_CPP_STATUS[status.state]}
    if status.state is ModelState.FAILED:
        document |= {"failed": True, "reason": status.reason}
    return document


def model_entry(
    status: ModelStatus, aliases: Iterable[str], created_unix_s: int, shown: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a model's entry in ``/models``; ``shown`` is what its owner says of it."""
    return {
        "id": status.name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "dynaplan",
        "aliases": sorted(aliases),
        "status": status_document(status),
        **shown,
    }


class RunningModel(NamedTuple):
    """A model as llama-swap's ``/running`` tells of it; ``url`` is that of its server, empty for others."""

    status: ModelStatus
    command: str
    url: str
    ttl_s: float
    name: str
    description: str


def running_document(models: Iterable[RunningModel]) -> dict[str, Any]:
    """Return llama-swap's ``/running``: each model that has a worker, with its ttl in seconds."""
    running = [
        {
            "model": each.status.name,
            "state": LLAMA_SWAP_STATE[each.status.state],
            "cmd": each.command,
            "proxy": each.url,
            "ttl": round(each.ttl_s),
            "name": each.name,
            "description": each.description,
        }
        for each in models
        if each.status.state in LLAMA_SWAP_STATE
    ]
    return {"running": running}


def change_events(before: Iterable[ModelStatus], after: Iterable[ModelStatus]) -> bytes:
    """Return the events of ``/models/sse`` for what has changed between two looks."""
    known = {each.name: status_document(each) for each in before}
    found = {each.name: status_document(each) for each in after}
    changed = [name for name, status in found.items() if known.get(name) != status]
    events = [{"model": name, "event": STATUS_CHANGE, "data": {"status": found[name]}} for name in changed]
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
