"""Handle each HTTP request: find its handler, accept or refuse it, forward it, and account for its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from urllib.parse import unquote

from aiohttp import web

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.fleet.page_access import PAGE_PATH
from dynaplan.gateway.admission import ApiKey, WaitingRoom
from dynaplan.gateway.answering import Exchange
from dynaplan.gateway.bodies.budget import BodyBudget, BodyShare
from dynaplan.gateway.bodies.reading import CallReader
from dynaplan.gateway.bodies.receiving import received_body
from dynaplan.gateway.forwarding import Forwarder
from dynaplan.gateway.metrics import CONTENT_TYPE, FrontendMetrics
from dynaplan.gateway.openai_api import (
    API_PATHS,
    ApiError,
    ApiPath,
    Call,
    bad_request,
    check_context,
    check_media,
)
from dynaplan.gateway.recording import TrafficRecording
from dynaplan.gateway.reporting.access_log import AccessLog
from dynaplan.gateway.reporting.tracing import RequestTrace
from dynaplan.gateway.routing.worker_router import WorkerRouter
from dynaplan.gateway.stream_tokens import Usage
from dynaplan.gateway.tracing.port import Attributes, Tracer
from dynaplan.util.errors import nearest
from dynaplan.util.http_routes import ALL_METRICS_PATH, trace_headers
from dynaplan.worker.named_requests import name_of

log = logging.getLogger(__name__)

MODELS = "/v1/models"

SLIP = 0.75
"""The least similarity, difflib's ratio, of a mistyped path: /v1/embeddings is none of /v1/completions."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class FrontendRequests:
    """Answers every request: completions through a worker, ``/health``, ``/metrics`` and the like by itself.

    While it ``is_draining`` it goes on answering, and ``/health`` says "draining" with status 503.
    """

    def __init__(
        self,
        settings: FrontendSettings,
        router: WorkerRouter,
        forwarder: Forwarder,
        metrics: FrontendMetrics,
        recording: TrafficRecording | None = None,
        all_metrics: Callable[[], Awaitable[bytes]] | None = None,
        page: Handler | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self._router = router
        self._forwarder = forwarder
        self._metrics = metrics
        self._recording = recording
        self._access = AccessLog() if settings.access_log else None
        self._all_metrics = all_metrics
        self._page = page
        self._tracer = tracer
        self._room = WaitingRoom(settings.max_waiting_requests)
        self._key = ApiKey(settings.api_key)
        self._budget = BodyBudget(settings.max_bodies_bytes)
        self._reader = CallReader(settings.max_body_bytes)
        self._created_s = int(time.time())
        self.in_flight = 0
        self.is_draining = False
        self._handlers: dict[str, tuple[str, Handler]] = {
            **{
                each.path: ("POST", partial(self._answer_tokens, endpoint=each))
                for each in API_PATHS.values()
            },
            MODELS: ("GET", self._models),
            "/health": ("GET", self._health),
            "/live": ("GET", self._live),
            "/metrics": ("GET", self._render_metrics),
            ALL_METRICS_PATH: ("GET", self._render_all_metrics),
        }

    async def close(self) -> None:
        """End the process that reads large bodies."""
        await self._reader.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Return the answer; every ApiError becomes a body of OpenAI's shape."""
        try:
            return await self._handler(request)(request)
        except ApiError as error:
            return web.Response(
                body=error.to_json(),
                status=error.status,
                headers={"Content-Type": "application/json", **error.headers},
            )

    def _handler(self, request: web.BaseRequest) -> Handler:
        if self._page and f"{request.path}/".startswith(f"{PAGE_PATH}/"):
            return self._page
        path = MODELS if request.path.startswith(MODELS + "/") else request.path
        method, handler = self._handlers.get(path, ("", self._live))
        if not method:
            hint = nearest(request.path, self._handlers, cutoff=SLIP)
            raise ApiError(
                404, f"There is no {request.path} here. {hint}", code="unknown_url", metric="not_found"
            )
        if request.method != method:
            raise ApiError(
                405,
                f"{request.path} takes {method} only",
                code="method_not_allowed",
                headers={"Allow": method},
            )
        return handler

    async def _answer_tokens(self, request: web.BaseRequest, endpoint: ApiPath) -> web.StreamResponse:
        self.in_flight += 1
        try:
            with self._budget.body() as share:
                call = await self._accepted(request, endpoint, share)
                return await self._forward(request, call)
        finally:
            self.in_flight -= 1

    async def _accepted(self, request: web.BaseRequest, endpoint: ApiPath, share: BodyShare) -> Call:
        """Read and check the request; a refusal is counted in the metrics and raised as ApiError."""
        model = "unknown"
        try:
            self._key.check(request.headers.get("Authorization", ""))
            self._room.check()
            body = await received_body(
                request,
                share,
                largest_bytes=self._settings.max_body_bytes,
                timeout_s=self._settings.body_timeout_s,
            )
            call = await self._reader.read(endpoint, body)
            self._check_named(call.model)
            model = call.model
            check_media(call, self._settings.allow_media_urls)
            check_context(call, self._context_tokens())
        except ApiError as error:
            self._metrics.refused(endpoint.name, error.metric, model)
            if self._access:
                self._access.refused(name_of(request), endpoint.name, error.metric)
            raise
        return call

    async def _forward(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        record = self._metrics.record(call.model, call.endpoint.name, call.is_stream)
        place = self._room.enter()
        exchange = Exchange(request, call, place, record)
        if self._tracer:
            span = self._tracer.begin(f"POST {call.endpoint.path}", trace_headers(request.headers))
            exchange.trace = RequestTrace(span)
        outcome = "cancelled"
        try:
            response = await self._forwarder.answer(exchange)
            await response.prepare(request)
            await response.write_eof()
            outcome = exchange.failure
        except ApiError as error:
            outcome = error.metric
            raise
        except ConnectionError:
            outcome = exchange.failure or outcome
            return web.Response()  # aiohttp wants one; the connection is closed, so it is not sent
        except RecursionError:
            # The parser follows deeper nesting than the writer that sends the prompt on.
            outcome = "validation"
            raise bad_request("The body is nested too deep.", code="invalid_json") from None
        except Exception as error:
            outcome = "internal"
            log.exception("a request failed")
            raise _internal_error() from error
        finally:
            place.leave()
            if outcome == "cancelled":
                self._metrics.client_left()
            stated = exchange.stated()
            record.finished(outcome, exchange.call.prompt_tokens, stated)
            if exchange.trace:
                exchange.trace.end(outcome, _attributes(exchange, stated))
            if self._recording and call.endpoint.streams:
                self._recording.ended(exchange, stated, is_answered=not outcome)
            if self._access:
                self._access.ended(exchange, stated, outcome, self._metrics.now_s() - record.begun_s)
        return response

    def _check_named(self, model: str) -> None:
        known = self._model_names()
        if model not in known:
            if not known:
                raise self._router.nobody("No worker has said yet which model it serves. Try again.")
            raise ApiError(
                404,
                f"The model {model!r} does not exist; there is {', '.join(sorted(known))}",
                code="model_not_found",
                param="model",
                metric="not_found",
            )

    def _model_names(self) -> set[str]:
        """Return the configured model name, and what the workers registered: models and adapters."""
        cards = [instance.card for instance in self._router.instances]
        names = {str(card.get("model") or "") for card in cards}
        names |= {str(name) for card in cards for name in card.get("loras") or ()}
        return (names | {self._settings.model}) - {""}

    def _context_tokens(self) -> int:
        """Return the longest context, in tokens, of the workers whose tokenizer the frontend has; else 0.

        Only the simulated engine's tokenizer is known here. Other engines check the length themselves.
        """
        cards = [instance.card for instance in self._router.instances]
        stated = [card.get("context_tokens") for card in cards if card.get("tokenizer") == "sim"]
        return max((tokens for tokens in stated if isinstance(tokens, int)), default=0)

    async def _models(self, request: web.BaseRequest) -> web.Response:
        self._key.check(request.headers.get("Authorization", ""))
        chosen = unquote(request.path.removeprefix(MODELS).removeprefix("/"))
        if chosen:
            self._check_named(chosen)
        models = [
            {"id": name, "object": "model", "created": self._created_s, "owned_by": "dynaplan"}
            for name in sorted(self._model_names())
        ]
        if chosen:
            return web.json_response(next(each for each in models if each["id"] == chosen))
        return web.json_response({"object": "list", "data": models})

    async def _health(self, request: web.BaseRequest) -> web.Response:
        workers = len(self._router.instances)
        missing = [] if workers else [self._settings.decode_component]
        is_healthy = workers > 0 and not self.is_draining
        document = {
            "status": "healthy" if is_healthy else "draining" if self.is_draining else "unhealthy",
            "workers": workers,
            "missing": missing,
        }
        return web.json_response(document, status=200 if is_healthy else 503)

    async def _live(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"status": "live"})

    async def _render_metrics(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self.own_metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _render_all_metrics(self, request: web.BaseRequest) -> web.Response:
        body = await self._all_metrics() if self._all_metrics else self.own_metrics()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    def own_metrics(self) -> bytes:
        """Return the metrics of the frontends on this port, in Prometheus' text format."""
        for name in self._model_names():
            cards = [each.card for each in self._router.instances]
            self._metrics.describe_model(name, bool(cards), cards[0] if cards else {})
        return self._metrics.render()


def _attributes(exchange: Exchange, stated: Usage) -> Attributes:
    """Return what a request's span tells, where there is one under OpenTelemetry's names or vLLM's."""
    call, record = exchange.call, exchange.record
    prompt, answer = stated.input_tokens, stated.output_tokens
    return {
        "gen_ai.request.model": call.model,
        "gen_ai.usage.input_tokens": call.prompt_tokens if prompt is None else prompt,
        "gen_ai.usage.output_tokens": record.output_tokens if answer is None else answer,
        "dynaplan.request_id": name_of(exchange.request),
        "dynaplan.worker": exchange.worker,
        **({} if record.ttft_s is None else {"gen_ai.latency.time_to_first_token": record.ttft_s}),
    }


def _internal_error() -> ApiError:
    return ApiError(
        500, "The frontend failed; its log says how", kind="server_error", code="internal", metric="internal"
    )
