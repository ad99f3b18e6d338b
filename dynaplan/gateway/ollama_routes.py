"""Ollama's API on the public port: its requests go the path of all others, translated on both ends.

``OllamaClient`` is the client's side of such a request for the request path: what is read of it is OpenAI's
request, and what is written to it becomes Ollama's answer (``ollama_api``). An event of a stream is read
here, which costs more than to pass it on; clients of OpenAI's API do not pay for it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial
from math import inf
from typing import Any

from aiohttp import web

from dynaplan.gateway.client import Client, WholeAnswer
from dynaplan.gateway.models import FrontendModel
from dynaplan.gateway.ollama_api import (
    API_VERSION,
    UNSUPPORTED,
    Answer,
    OllamaError,
    OllamaModel,
    Translation,
    chat_request,
    embed_request,
    embeddings_of_one,
    error_document,
    generate_request,
    known_name,
    only_loaded,
    ps_document,
    show_document,
    tags_document,
)
from dynaplan.gateway.openai_api import API_PATHS, ApiError, bad_request
from dynaplan.gateway.request_bodies import BodyShare
from dynaplan.gateway.request_path import RequestPath

JSON = "application/json; charset=utf-8"
NDJSON = "application/x-ndjson"

Translate = Callable[[Mapping[str, Any], Collection[str]], Translation]

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_TRANSLATED: Mapping[str, Translate] = {
    "/api/chat": chat_request,
    "/api/generate": generate_request,
    "/api/embed": embed_request,
    "/api/embeddings": embed_request,
}
ONE_EMBEDDING = "/api/embeddings"


class OllamaClient(Client):
    """The client of one request of Ollama's that a worker computes."""

    stream_headers: Mapping[str, str] = {"Content-Type": NDJSON, "Cache-Control": "no-cache"}

    def __init__(self, request: web.BaseRequest, asked: Translation, now_s: Callable[[], float]) -> None:
        super().__init__(request)
        self._asked, self._now_s = asked, now_s
        arrived_s = now_s()
        self._answer = Answer(asked, arrived_s, arrived_s, time.time() - arrived_s)
        self._is_single = request.path == ONE_EMBEDDING

    def note_loaded(self) -> None:
        self._answer.admitted_s = self._now_s()

    async def read_body(self, share: BodyShare, *, max_bytes: int, timeout_s: float) -> bytes:
        """Return OpenAI's request: the client's own was read to find out its path."""
        return json.dumps(self._asked.body).encode()

    async def write(self, events: bytes) -> None:
        """Send whole events of OpenAI's as lines of Ollama's; comments are no part of its streams."""
        told = b"".join(map(self._line_of, _data_of(events)))
        if told:
            await super().write(told)

    async def finish(self, whole: WholeAnswer | None) -> None:
        if whole is None:
            if not self._is_broken_off:
                await super().write(self._answer.on_end(self._now_s()))
            await super().finish(None)
            return
        document = self._whole(whole.status, json.loads(whole.body))
        headers = {**whole.headers, "Content-Type": JSON}
        await super().finish(WholeAnswer(whole.status, headers, json.dumps(document).encode()))

    def _whole(self, status: int, document: dict[str, Any]) -> dict[str, Any]:
        if status >= 400:
            return error_document(_message(document))
        if self._asked.path != "/v1/embeddings":
            return self._answer.on_document(document, self._now_s())
        told = self._answer.on_embeddings(document, self._now_s())
        return embeddings_of_one(told) if self._is_single else told

    def _line_of(self, data: bytes) -> bytes:
        event = json.loads(data)
        if "error" in event:
            return self._answer.on_failure(_message(event))
        return self._answer.on_event(event, self._now_s())


def _data_of(events: bytes) -> list[bytes]:
    """Return the JSON of each event; the mark of the end is none."""
    lines = (line.strip() for line in events.split(b"\n"))
    return [line[5:].strip() for line in lines if line.startswith(b"data:") and b"[DONE]" not in line[:16]]


def _message(document: Mapping[str, Any]) -> str:
    error = document.get("error", document)
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


class OllamaRoutes:
    """Answers Ollama's paths by the request path."""

    def __init__(self, path: RequestPath) -> None:
        self._path = path

    def handlers(self) -> dict[str, tuple[str, Handler]]:
        """Return the method and the handler of each path."""
        own: dict[str, tuple[str, Handler]] = {
            "/api/version": ("GET", self._version),
            "/api/tags": ("GET", self._tags),
            "/api/ps": ("GET", self._ps),
            "/api/show": ("POST", self._show),
        }
        own |= {path: ("POST", partial(self._compute, translate=how)) for path, how in _TRANSLATED.items()}
        own |= {path: (method, self._refuse) for path, (method, _) in UNSUPPORTED.items()}
        return {path: (method, partial(self._answer, handler=each)) for path, (method, each) in own.items()}

    async def _answer(self, request: web.BaseRequest, handler: Handler) -> web.StreamResponse:
        """Answer; an error is written as Ollama writes it."""
        try:
            return await handler(request)
        except OllamaError as error:
            return web.json_response(error_document(str(error)), status=400)
        except ApiError as error:
            document = error_document(str(error))
            return web.json_response(document, status=error.status, headers=error.headers or None)

    async def _version(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"version": API_VERSION})

    async def _refuse(self, request: web.BaseRequest) -> web.Response:
        return web.json_response(error_document(UNSUPPORTED[request.path][1]), status=501)

    async def _tags(self, request: web.BaseRequest) -> web.Response:
        self._check_key(request)
        return web.json_response(tags_document(self._models()))

    async def _ps(self, request: web.BaseRequest) -> web.Response:
        self._check_key(request)
        return web.json_response(ps_document(each for each in self._models() if each.is_loaded))

    async def _show(self, request: web.BaseRequest) -> web.Response:
        self._check_key(request)
        document = await self._read(request)
        name = known_name(str(document.get("model") or document.get("name") or ""), self._path.models.names())
        return web.json_response(show_document(_ollama_model(name, self._path.models.find(name))))

    async def _compute(self, request: web.BaseRequest, translate: Translate) -> web.StreamResponse:
        self._check_key(request)
        asked = translate(await self._read(request), self._path.models.names())
        queue = self._path.models.find(asked.model).queue
        try:
            if not asked.path:
                return await self._only_load(asked)
            client = OllamaClient(request, asked, self._path.now_s)
            await self._path.answer(client, API_PATHS[asked.path])
            return client.response
        finally:
            if queue and asked.keep_alive_s is not None:
                queue.keep_alive(asked.keep_alive_s)

    async def _only_load(self, asked: Translation) -> web.Response:
        """Answer a request without a prompt: when its model is loaded, or at once where it is to leave."""
        model = self._path.models.find(asked.model)
        if model.queue and not asked.is_unload:
            await model.queue.load(model.router)
        return web.json_response(only_loaded(asked, time.time()))

    def _models(self) -> list[OllamaModel]:
        listed = [each for each in self._path.models.all if not each.is_unlisted]
        named = sorted((name, number) for number, each in enumerate(listed) for name in each.names)
        return [_ollama_model(name, listed[number]) for name, number in named]

    async def _read(self, request: web.BaseRequest) -> dict[str, Any]:
        """Return the body as a document; Ollama's clients do not always name its type."""
        settings = self._path.settings
        with self._path.bodies.body() as share:
            body = await Client(request).read_body(
                share, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
            )
            try:
                document = json.loads(body)
            except (ValueError, RecursionError):
                raise bad_request("The body is no JSON.", code="invalid_json") from None
        if not isinstance(document, dict):
            raise bad_request("The body is no JSON object.", code="invalid_json")
        return document

    def _check_key(self, request: web.BaseRequest) -> None:
        self._path.admission.check_key(request.headers.get("Authorization", ""))


def _ollama_model(name: str, model: FrontendModel) -> OllamaModel:
    """Return the model for Ollama's clients; what its workers' cards do not say is not known."""
    card, report = next(iter(model.cards), {}), model.queue.report if model.queue else None
    context = card.get("context_tokens")
    memory_bytes = report.memory_bytes if report else 0
    return OllamaModel(
        name,
        size_bytes=memory_bytes,
        vram_bytes=memory_bytes if report and report.gpus else 0,
        context_tokens=context if isinstance(context, int) else 0,
        expires_unix_s=(report.leaves_unix_s if report else 0.0) or inf,
        is_loaded=bool(card),
    )
