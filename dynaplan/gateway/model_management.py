"""The paths by which clients look at models and move them: llama.cpp's router mode, and llama-swap's.

| path | of | answer |
|---|---|---|
| ``GET /models``, as ``/v1/models`` | both | entries of models with ``status.value`` (``routes``) |
| ``POST /models/load``, ``/models/unload`` | llama.cpp | ``{"success": true}`` at once; the status says the
rest | | ``GET /running`` | llama-swap | the models that have a worker |
| ``GET /unload``, ``POST /api/models/unload[/MODEL]`` | llama-swap | ``OK`` at once |

A load or unload is an order, as ``dynaplan load`` and ``unload`` write it, and an unloaded model finishes
what it answers. All of these are behind the API key.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import unquote

from aiohttp import web

from dynaplan.gateway.client import Client
from dynaplan.gateway.models import FrontendModel
from dynaplan.gateway.openai_api import bad_request
from dynaplan.gateway.request_path import RequestPath

WriteOrder = Callable[[str, Mapping[str, Any]], Awaitable[None]]
"""Writes an order (``fleet.model_keys.ModelOrder``'s fields) for the model of that name."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

UNLOAD = "/api/models/unload"
PREFIXES = (UNLOAD,)
"""The paths that a model's name may follow."""

LLAMA_SWAP_STATES: Mapping[str, str] = {
    "loading": "starting",
    "ready": "ready",
    "draining": "stopping",
    "asleep": "stopped",
}
"""llama-swap's words for the states of models that have a worker."""


class ModelManagement:
    """Answers these paths. In a deployment of one model that one is always loaded."""

    def __init__(self, path: RequestPath, order: WriteOrder) -> None:
        self._path = path
        self._order = order

    def handlers(self) -> dict[str, tuple[str, Handler]]:
        """Return the method and the handler of each path."""
        return {
            "/models/load": ("POST", self._load),
            "/models/unload": ("POST", self._unload),
            "/running": ("GET", self._running),
            "/unload": ("GET", self._unload_all),
            UNLOAD: ("POST", self._unload_by_path),
        }

    async def _load(self, request: web.BaseRequest) -> web.Response:
        model = await self._named(request)
        if model.queue:
            await self._order(model.name, {"load_unix_s": time.time()})
        return web.json_response({"success": True})

    async def _unload(self, request: web.BaseRequest) -> web.Response:
        await self._put_away(await self._named(request))
        return web.json_response({"success": True})

    async def _unload_by_path(self, request: web.BaseRequest) -> web.Response:
        name = unquote(request.path.removeprefix(UNLOAD).removeprefix("/"))
        if not name:
            return await self._unload_all(request)
        self._check_key(request)
        await self._put_away(self._path.models.find(name))
        return web.Response(text="OK")

    async def _unload_all(self, request: web.BaseRequest) -> web.Response:
        self._check_key(request)
        for model in self._path.models.all:
            if model.queue and model.queue.report and model.queue.report.state in LLAMA_SWAP_STATES:
                await self._put_away(model)
        return web.Response(text="OK")

    async def _put_away(self, model: FrontendModel) -> None:
        if model.queue is None:
            raise bad_request("The deployment has one model, which is always loaded.", param="model")
        if model.queue.report and model.queue.report.is_pinned:
            raise bad_request(
                f"{model.name} is pinned: `dynaplan unpin {model.name}` comes first.", param="model"
            )
        await self._order(model.name, {"unload_unix_s": time.time(), "keep_until_unix_s": 0.0})

    async def _running(self, request: web.BaseRequest) -> web.Response:
        self._check_key(request)
        found = [each for model in self._path.models.all if (each := _running_entry(model))]
        return web.json_response({"running": found})

    async def _named(self, request: web.BaseRequest) -> FrontendModel:
        """Return the model that the body names; raises ApiError."""
        self._check_key(request)
        settings = self._path.settings
        with self._path.bodies.body() as share:
            body = await Client(request).read_body(
                share, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
            )
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        name = document.get("model") if isinstance(document, dict) else None
        if not isinstance(name, str):
            raise bad_request('The body has to be {"model": NAME}.', param="model")
        return self._path.models.find(name)

    def _check_key(self, request: web.BaseRequest) -> None:
        self._path.admission.check_key(request.headers.get("Authorization", ""))


def _running_entry(model: FrontendModel) -> dict[str, Any] | None:
    """Return llama-swap's entry of a model; None for one without a worker.

    The address of a worker (``proxy``) and its command are not told: workers take requests of frontends only.
    """
    state = model.queue.report.state if model.queue and model.queue.report else ""
    if model.queue is None:
        state = "ready" if model.router.instances else ""
    if state not in LLAMA_SWAP_STATES:
        return None
    return {
        "model": model.name or next(iter(sorted(model.names)), ""),
        "state": LLAMA_SWAP_STATES[state],
        "cmd": "",
        "proxy": "",
        "ttl": round(model.queue.ttl_s) if model.queue else 0,
        "name": "",
        "description": "",
    }
