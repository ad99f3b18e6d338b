"""The routes of the public port: from a request's path to what answers it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

from dynaplan.contract.page_access import PAGE_PATH
from dynaplan.gateway.client import Client
from dynaplan.gateway.engine_paths import EnginePathProxy
from dynaplan.gateway.error_forms import error_answer
from dynaplan.gateway.metrics import CONTENT_TYPE
from dynaplan.gateway.model_routes import ModelRoutes, get_has_side_effects
from dynaplan.gateway.openai_api import (
    API_PATHS,
    UNKNOWN_URL,
    ApiError,
    ApiPath,
    internal_error,
    not_implemented,
)
from dynaplan.gateway.passthrough import find_unserved
from dynaplan.gateway.reports import CANCELLED
from dynaplan.gateway.request_path import RequestPath
from dynaplan.http.browser_policy import BrowserRefusal, is_preflight, preflight_headers
from dynaplan.http.messages import Headers, Request, Response
from dynaplan.http.routes import ALL_METRICS_PATH, LOAD_HISTORY_PATH
from dynaplan.http.server import Handler
from dynaplan.util.errors import nearest

log = logging.getLogger(__name__)

MODELS = "/v1/models"

SLIP = 0.75
"""The least similarity, difflib's ratio, of a mistyped path: /v1/embeddings is none of /v1/completions."""


READING = ("GET", "HEAD")
"""The methods of requests that change nothing, unless their route does."""

PATH_ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/reranking": "/rerank",
    "/v1/reranking": "/v1/rerank",
    **{
        f"/v/{name}": f"/v1/{name}"
        for name in ("chat/completions", "completions", "embeddings", "rerank", "responses", "messages")
    },
}
"""Further names of paths: llama.cpp's, and llama-swap's without a version."""

MAX_STARTS_A_TURN = 16
"""Requests that begin in one turn of the loop, which takes some 4 ms.

The others of a hundred that come at once begin in the next turns, and other streams go on between them.
"""


def _refused(refusal: BrowserRefusal) -> ApiError:
    return ApiError(refusal.status, refusal.message, kind="permission_error", code=refusal.code)


class DeploymentMetricsPort(Protocol):
    """The metrics of the whole deployment, in Prometheus' text format."""

    async def read(self, render_own: Callable[[], bytes]) -> bytes:
        """Return the whole text; ``render_own`` returns the part of the frontends on this port."""
        ...

    async def close(self) -> None: ...


class FrontendRoutes:
    """Answers every request: completions by the request path, ``/health``, ``/metrics`` and others by itself.

    ``page`` answers for the web page, if there is one, and ``deployment_metrics`` for what the frontend alone
    cannot know: without them ``/metrics/all`` has its own metrics. While it ``is_draining`` it goes on
    answering, and ``/health`` says "draining" with status 503.
    """

    def __init__(self, path: RequestPath, deployment_metrics: DeploymentMetricsPort | None = None) -> None:
        self.page: Handler | None = None
        self.model_routes: ModelRoutes | None = None
        self._passage = EnginePathProxy(path, self.handle)
        self._path = path
        self._browsers = path.admission.browsers
        self._begun = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._deployment_metrics = deployment_metrics
        self._created_s = int(time.time())
        self.is_draining = False
        self._handlers: dict[str, tuple[str, Handler]] = {
            **{
                path: ("POST", partial(self._answer_by_worker, endpoint=API_PATHS[known]))
                for path, known in {**{each: each for each in API_PATHS}, **PATH_ALIASES}.items()
            },
            MODELS: ("GET", self._list_models),
            "/health": ("GET", self._check_health),
            "/live": ("GET", self._check_life),
            "/metrics": ("GET", self._render_metrics),
            ALL_METRICS_PATH: ("GET", self._render_all_metrics),
            LOAD_HISTORY_PATH: ("GET", self._render_history),
        }

    def handle(self, request: Request) -> Awaitable[Response | None]:
        """Return the answer, None when it has been sent, to be awaited; raises ApiError, as that may."""
        if request.is_from_browser:
            self._check_browser(request)
            if is_preflight(request.method, request.headers):
                return self._allow(request)
        elif (refusal := self._browsers.host_refusal(request.headers)) and not self._is_of_page(request.path):
            raise _refused(refusal)
        return self._handler(request)(request)

    def failed(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request over which an error was raised, in the form of its API."""
        if not isinstance(error, ApiError):
            log.error("a request failed", exc_info=error)
            error = internal_error()
        return error_answer(request.path, error)

    async def _allow(self, request: Request) -> Response:
        return Response(204, preflight_headers(request.headers), b"")

    @property
    def paths(self) -> dict[str, frozenset[str]]:
        """Every path that is answered here, the page's apart, with its methods; ``/*`` is anything below."""
        found = {path: frozenset([method]) for path, (method, _) in self._handlers.items()}
        return {**(self.model_routes.paths if self.model_routes else {}), **found}

    def readable_by(self, path: str, headers: Headers) -> str:
        """Return the web origin whose scripts may read the answer; empty for none, and below the page."""
        return "" if self._is_of_page(path) else self._browsers.readable_by(headers)

    def _check_browser(self, request: Request) -> None:
        """Raise ApiError for what a web page may not send; the page's own paths are guarded elsewhere."""
        if self._is_of_page(request.path):
            return
        is_change = request.method not in READING or not self._only_reads(request.path)
        if refusal := self._browsers.refuse(request.headers, is_change=is_change):
            raise _refused(refusal)

    def _only_reads(self, path: str) -> bool:
        """Tell whether a GET of that path changes nothing; of an engine's own path it may load a model."""
        methods = self.paths.get(path, ("GET",) if path.startswith(f"{MODELS}/") else ())
        return "GET" in methods and not get_has_side_effects(path)

    def _is_of_page(self, path: str) -> bool:
        return bool(self.page) and f"{path}/".startswith(f"{PAGE_PATH}/")

    def _handler(self, request: Request) -> Handler:
        method, handler = self._handlers.get(request.path, ("", self._check_life))
        if method == request.method:
            return handler
        if self.page and self._is_of_page(request.path):
            return self.page
        if self.model_routes and not method and (found := self.model_routes.find(request)):
            return found
        path = MODELS if request.path.startswith(MODELS + "/") else request.path
        method, handler = self._handlers.get(path, ("", self._check_life))
        if request.method == method:
            return handler
        if methods := ", ".join(sorted([method] if method else self.paths.get(path, ()))):
            raise ApiError(
                405, f"{path} takes {methods} only", code="method_not_allowed", headers={"Allow": methods}
            )
        hint = nearest(path, self.paths.keys() - PATH_ALIASES, cutoff=SLIP)
        if self._passage.takes(path, is_slip=hint.startswith("Did")):
            return self._passage.answer
        if reason := find_unserved(path):
            raise not_implemented(reason)
        raise ApiError(404, f"There is no {path} here. {hint}", code=UNKNOWN_URL, metric="not_found")

    def _answer_by_worker(self, request: Request, endpoint: ApiPath) -> Awaitable[Response | None]:
        loop = asyncio.get_running_loop()
        if self._begun == MAX_STARTS_A_TURN:
            self._waiting.append(turn := loop.create_future())
            return self._answer_in_turn(turn, Client(request), endpoint)
        if not self._begun:
            loop.call_soon(self._begin_turn)
        self._begun += 1
        return self._path.answer(Client(request), endpoint)

    async def _answer_in_turn(
        self, turn: asyncio.Future[None], client: Client, endpoint: ApiPath
    ) -> Response | None:
        try:
            await turn
        except asyncio.CancelledError:
            self._path.reports.refuse(client, endpoint, CANCELLED, "unknown")
            raise
        return await self._path.answer(client, endpoint)

    def _begin_turn(self) -> None:
        """Let the requests begin that wait for it, as many as may, in their order."""
        self._begun = 0
        while self._waiting and self._begun < MAX_STARTS_A_TURN:
            turn = self._waiting.popleft()
            if not turn.done():  # its client has left
                turn.set_result(None)
                self._begun += 1
        if self._begun:
            asyncio.get_running_loop().call_soon(self._begin_turn)

    async def _list_models(self, request: Request) -> Response:
        holder = self._path.admission.check_key(request.headers)
        chosen, models = request.path.removeprefix(MODELS).removeprefix("/"), self._path.models
        if not chosen:
            return Response.json({"object": "list", "data": models.documents(self._created_s, holder)})
        model = models.find(chosen)
        if holder:
            holder.check_model(chosen, model.names)
        known = models.documents(self._created_s, holder, with_unlisted=True)
        return Response.json(next(each for each in known if each["id"] == chosen))

    async def _check_health(self, request: Request) -> Response:
        models, workers = self._path.models, len(self._path.models.instances)
        if models.are_on_demand:
            missing = [] if models.are_reported else ["fleet"]
        else:
            missing = [] if workers else [self._path.settings.decode_component]
        is_healthy = not missing and not self.is_draining
        document = {
            "status": "healthy" if is_healthy else "draining" if self.is_draining else "unhealthy",
            "workers": workers,
            "missing": missing,
        }
        return Response.json(document, 200 if is_healthy else 503)

    async def _check_life(self, request: Request) -> Response:
        return Response.json({"status": "live"})

    async def _render_metrics(self, request: Request) -> Response:
        return Response(200, {"Content-Type": CONTENT_TYPE}, self.own_metrics())

    async def _render_all_metrics(self, request: Request) -> Response:
        others = self._deployment_metrics
        body = await others.read(self.own_metrics) if others else self.own_metrics()
        return Response(200, {"Content-Type": CONTENT_TYPE}, body)

    async def _render_history(self, request: Request) -> Response:
        body = self._path.reports.metrics.render_history()
        return Response(200, {"Content-Type": "application/json"}, body)

    def own_metrics(self) -> bytes:
        """Return the metrics of the frontends on this port, in Prometheus' text format."""
        metrics = self._path.reports.metrics
        for model in self._path.models.all:
            cards = model.cards
            for name in model.names:
                metrics.describe_model(name, bool(cards), cards[0] if cards else {})
        return metrics.render()
