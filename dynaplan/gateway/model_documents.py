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

from dynaplan.models.model import ModelState

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


def status_document(state: ModelState, why: str = "") -> dict[str, Any]:
    """Return llama.cpp's ``status`` of a model; ``why`` is the reason of a failure."""
    document: dict[str, Any] = {"value": LLAMA_CPP_STATUS[state]}
    if state is ModelState.FAILED:
        document |= {"failed": True, "reason": why}
    return document


def model_entry(
    name: str,
    status: Mapping[str, Any],
    aliases: Iterable[str],
    created_unix_s: int,
    shown: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a model's entry in ``/models``; ``shown`` is what its owner says of it."""
    return {
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "dynaplan",
        "aliases": sorted(aliases),
        "status": status,
        **shown,
    }


class RunningModel(NamedTuple):
    """A model as llama-swap's ``/running`` tells of it; ``url`` is that of its server, empty for others."""

    name: str
    state: ModelState
    command: str
    url: str
    ttl_s: float
    display_name: str
    description: str


def running_document(models: Iterable[RunningModel]) -> dict[str, Any]:
    """Return llama-swap's ``/running``: each model that has a worker, with its ttl in seconds."""
    running = [
        {
            "model": each.name,
            "state": LLAMA_SWAP_STATE[each.state],
            "cmd": each.command,
            "proxy": each.url,
            "ttl": round(each.ttl_s),
            "name": each.display_name,
            "description": each.description,
        }
        for each in models
        if each.state in LLAMA_SWAP_STATE
    ]
    return {"running": running}


def change_events(before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the events of ``/models/sse`` for what has changed between two looks at each ``status``."""
    changed = [name for name, status in after.items() if before.get(name) != status]
    events = [{"model": name, "event": STATUS_CHANGE, "data": {"status": after[name]}} for name in changed]
    return b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events)
