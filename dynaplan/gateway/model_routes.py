"""The paths by which clients see and move models: llama.cpp's, llama-swap's, and Ollama's API.

``model_documents`` and ``ollama_api`` have their documents; here they meet the frontend's requests. All of
them ask for the API key where one is set. A request in Ollama's words goes through the request path as one in
OpenAI's: its answer is translated on its way to the client by ``OllamaConnection``.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from typing import Any, cast

from msgspec.structs import replace

from dynaplan.contract.model_orders import change_order, load_order, unload_order
from dynaplan.engines.model_facts import ModelFacts, model_path, read_facts
from dynaplan.gateway import llama_swap_api, model_documents, ollama_api
from dynaplan.gateway.client import Client
from dynaplan.gateway.engine_paths import Completions, EnginePathProxy
from dynaplan.gateway.error_forms import message_of, sentence_of
from dynaplan.gateway.frontend_models import FrontendModel
from dynaplan.gateway.keys.keyring import KeyHolder
from dynaplan.gateway.llama_swap_api import LlamaSwapApi
from dynaplan.gateway.model_documents import RunningModel
from dynaplan.gateway.ollama_api import OllamaModel, Translation
from dynaplan.gateway.openai_api import CONTEXT_CODE, ApiError, bad_request, parse_object
from dynaplan.gateway.request_bodies import MAX_INLINE_PARSE_BYTES, BodyShare
from dynaplan.gateway.request_path import RequestPath
from dynaplan.http.messages import Answering, Request, Response, WholeBody
from dynaplan.http.server import Handler
from dynaplan.models.model import LOADED
from dynaplan.store.port import KeyValueStore

EVENTS_POLL_S = 0.2
"""Time between two looks for changes that ``/models/sse`` tells."""

_STREAM = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class ModelRoutes:
    """Answers the paths about models. ``completions`` answers OpenAI's paths."""

    def __init__(
        self,
        path: RequestPath,
        store: KeyValueStore,
        namespace: str,
        completions: Completions,
        swap: LlamaSwapApi,
    ) -> None:
        self._models = models = path.models
        self._path = path
        self._store = store
        self._namespace = namespace
        self._completions = completions
        self._swap = swap
        self._passage = EnginePathProxy(path, completions)
        self._created_s = int(time.time())
        self._facts = FactsOfModels()
        self._handlers: dict[tuple[str, str], Handler] = {
            ("GET", "/"): self._say_running,
            ("HEAD", "/"): self._say_running,
            ("GET", "/api/version"): self._version,
            ("GET", "/api/tags"): self._tags,
            ("GET", "/api/ps"): self._ps,
            ("POST", "/api/show"): self._show,
            **{("POST", each): self._ollama for each in ollama_api.TRANSLATORS},
        }
        if models.are_on_demand:
            self._handlers |= {
                ("GET", "/models"): self._list,
                ("GET", "/models/sse"): self._events,
                ("POST", "/models/load"): self._load,
                ("POST", "/models/unload"): self._unload,
                ("GET", "/running"): self._running,
                ("GET", "/unload"): self._unload_all,
                ("POST", "/api/models/unload"): self._unload_by_api,
                ("GET", "/upstream"): self._lead_to_page,
                ("GET", "/logs"): self._for_admin(self._swap.logs),
                ("GET", "/logs/stream"): self._for_admin(self._stream_logs),
                ("GET", "/api/events"): self._for_admin(self._swap.events),
                ("GET", "/api/metrics"): self._for_admin(self._swap.metrics),
            }

    @property
    def paths(self) -> dict[str, frozenset[str]]:
        """Every path that is answered here, with its methods; ``/*`` is anything below."""
        found: dict[str, frozenset[str]] = {}
        for method, path in self._handlers:
            found[path] = found.get(path, frozenset()) | {method}
        found |= dict.fromkeys(ollama_api.UNSUPPORTED, frozenset(["POST"]))
        if self._models.are_on_demand:
            found[f"{_LOGS}*"] = frozenset(["GET"])
            found |= {f"{_UNLOAD}*": frozenset(["POST"]), f"{_UPSTREAM}*": frozenset(["GET", "POST"])}
        return found

    def find(self, request: Request) -> Handler | None:
        """Return the handler of the request; None when its path is not about models."""
        found = self._handlers.get((request.method, request.path))
        if found:
            return found
        if request.path in ollama_api.UNSUPPORTED or request.path.startswith("/api/blobs/"):
            return self._refuse_unsupported
        if self._models.are_on_demand and request.method == "POST" and request.path.startswith(_UNLOAD):
            return self._unload_one
        if self._models.are_on_demand and request.path.startswith(_UPSTREAM):
            return self._upstream
        if self._models.are_on_demand and request.method == "GET" and request.path.startswith(_LOGS):
            return self._for_admin(self._stream_logs)
        return None

    # -- llama.cpp and llama-swap ----------------------------------------------------------------

    async def _list(self, request: Request) -> Response:
        data = [
            model_documents.model_entry(each.name, each.status, each.aliases, self._created_s, each.shown())
            for each in self._usable(request)
            if not each.is_unlisted
        ]
        return Response.json({"object": "list", "data": data})

    async def _running(self, request: Request) -> Response:
        return Response.json(model_documents.running_document(map(_running, self._usable(request))))

    async def _load(self, request: Request) -> Response:
        self._check_admin(request)
        model = self._models.find(str((await self._document(request)).get("model") or ""))
        await self._order(model, load_order(time.time()))
        return Response.json({"success": True})

    async def _unload(self, request: Request) -> Response:
        self._check_admin(request)
        model = self._models.find(str((await self._document(request)).get("model") or ""))
        await self._put_away(model)
        return Response.json({"success": True})

    async def _unload_all(self, request: Request) -> Response:
        self._check_admin(request)
        for model in self._models.all:
            if model.state in LOADED and not _is_pinned(model):
                await self._put_away(model)
        return Response.text("OK")

    async def _unload_by_api(self, request: Request) -> Response:
        await self._unload_all(request)
        return Response.json({"msg": "ok"})

    async def _unload_one(self, request: Request) -> Response:
        self._check_admin(request)
        await self._put_away(self._models.find(request.path.removeprefix(_UNLOAD)))
        return Response.text("OK")

    async def _upstream(self, request: Request) -> Response | None:
        return await self._passage.answer_upstream(request, _UPSTREAM)

    async def _lead_to_page(self, request: Request) -> Response:
        return Response(302, {"Location": llama_swap_api.PAGE}, b"")

    async def _stream_logs(self, request: Request) -> None:
        await self._swap.stream_logs(request, request.path.removeprefix(_LOGS.rstrip("/")).strip("/"))

    def _for_admin(self, handler: Handler) -> Handler:
        """Return the handler as one that asks first for a key that may see others' requests."""

        async def answer(request: Request) -> Response | None:
            self._check_admin(request)
            return await handler(request)

        return answer

    async def _events(self, request: Request) -> None:
        """Send an event for each change of a model's state, until the client leaves."""
        models = self._usable(request)
        connection = request.connection
        connection.start_stream(request, _STREAM)
        before = {each.name: each.status for each in models}
        await connection.write(model_documents.change_events({}, before))
        while True:
            await asyncio.sleep(EVENTS_POLL_S)
            after = {each.name: each.status for each in models}
            if events := model_documents.change_events(before, after):
                await connection.write(events)
            before = after

    # -- Ollama ----------------------------------------------------------------------------------

    async def _say_running(self, request: Request) -> Response:
        return Response.text("Ollama is running")  # the text that its clients look for

    async def _version(self, request: Request) -> Response:
        return Response.json({"version": ollama_api.API_VERSION})

    async def _tags(self, request: Request) -> Response:
        listed = [each for each in self._usable(request) if not each.is_unlisted]
        named = [(name, each) for each in listed for name in sorted(each.names)]
        return Response.json(ollama_api.tags_document(await self._describe(named)))

    async def _ps(self, request: Request) -> Response:
        words = model_documents.LLAMA_CPP_STATUS
        loaded = [each for each in self._usable(request) if words[each.state] in ("loaded", "loading")]
        named = [(name, each) for each in loaded for name in _own(each)]
        return Response.json(ollama_api.ps_document(await self._describe(named)))

    async def _show(self, request: Request) -> Response:
        document = await self._document(request)
        name = str(document.get("model") or document.get("name") or "")
        model = self._models.find(name)
        self._check_model(request, name, model)
        (described,) = await self._describe([(name, model)])
        is_verbose = document.get("verbose") is True
        return Response.json(ollama_api.show_document(described, is_verbose=is_verbose))

    async def _refuse_unsupported(self, request: Request) -> Response:
        path = next(each for each in ollama_api.UNSUPPORTED if request.path.startswith(each))
        return Response.json(ollama_api.error_document(ollama_api.UNSUPPORTED[path]), 501)

    async def _describe(self, named: Iterable[tuple[str, FrontendModel]]) -> list[OllamaModel]:
        return [_described(name, each, await self._facts.of(each)) for name, each in named]

    async def _ollama(self, request: Request) -> Response | None:
        with closing(BodyShare(self._path.bodies)) as share:
            body = await self._body(request, share)
            asked, body = await self._path.reader.translate(request.path, body)
        return await self._answer_ollama(request, asked, body)

    async def _answer_ollama(self, request: Request, asked: Translation, body: bytes) -> Response | None:
        model, arrived_s = self._models.find(asked.model), time.monotonic()
        holder = self._check_model(request, asked.model, model)
        may_put_away = holder is None or holder.settings.admin
        if holder and asked.is_unload:
            holder.check_admin("To unload a model")
        try:
            if model.queue and not asked.is_unload:  # so that the time of the load is known
                (await model.queue.book(model.router, None, None)).close()
            if not asked.path:
                return Response.json(ollama_api.load_answer(asked, request.path, time.time()))
            connection = OllamaConnection(
                request.connection, asked, arrived_s, is_old=request.path == "/api/embeddings"
            )
            if asked.is_truncated:
                return connection.translated(await self._embed(request, asked, body))
            response = await self._completions(
                replace(
                    request, path=asked.path, body=WholeBody(body), connection=cast(Answering, connection)
                )
            )
            return connection.translated(response) if response else None
        finally:
            if model.queue and asked.keep_alive_s is not None and may_put_away:
                model.queue.keep_alive(asked.keep_alive_s)

    async def _embed(self, request: Request, asked: Translation, body: bytes) -> Response:
        """Return the answer to a request for embeddings; texts are cut until the engine takes them."""
        for cuts in range(ollama_api.MAX_CUTS + 1):
            held = HeldAnswer()
            own = replace(request, path=asked.path, body=WholeBody(body), connection=cast(Answering, held))
            response = await self._completions(own) or held.response
            if CONTEXT_CODE.encode() not in response.body or cuts == ollama_api.MAX_CUTS:
                break
            body = ollama_api.cut_texts(body, message_of(response.body))
        return response

    # --------------------------------------------------------------------------------------------

    def _check_admin(self, request: Request) -> None:
        self._path.admission.check_admin(request.headers, request.path)

    def _check_model(self, request: Request, asked: str, model: FrontendModel) -> KeyHolder | None:
        if holder := self._path.admission.check_key(request.headers):
            holder.check_model(asked, model.names)
        return holder

    def _usable(self, request: Request) -> list[FrontendModel]:
        """Return the models that the request's key is for."""
        return self._models.usable_by(self._path.admission.check_key(request.headers))

    async def _document(self, request: Request) -> dict[str, Any]:
        """Read a short JSON body that names a model; raises ApiError for one that is too long or invalid."""
        with closing(BodyShare(self._path.bodies)) as share:
            body = await self._body(request, share)
        if len(body) > MAX_INLINE_PARSE_BYTES:
            raise bad_request(f"The body takes {len(body)} bytes; {request.path} takes the name of a model")
        return parse_object(body or b"{}")

    async def _body(self, request: Request, share: BodyShare) -> bytes:
        self._path.admission.check_key(request.headers)
        settings = self._path.settings
        return await Client(request).read_body(
            share, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )

    async def _put_away(self, model: FrontendModel) -> None:
        """Write the order to unload the model; raises ApiError (409) for one that its owner has pinned."""
        if _is_pinned(model):
            raise ApiError(
                409,
                f"{model.name} is pinned: `dynaplan unpin {model.name}` comes first",
                code="models_pinned",
            )
        await self._order(model, unload_order(time.time()))

    async def _order(self, model: FrontendModel, order: Mapping[str, Any]) -> None:
        await change_order(self._store, self._namespace, model.name, order)


_UNLOAD = "/api/models/unload/"
_UPSTREAM = "/upstream/"
_LOGS = "/logs/stream/"


def get_has_side_effects(path: str) -> bool:
    """Tell whether a GET of that path loads or unloads models, as llama-swap's do."""
    return path == "/unload" or path.startswith(_UPSTREAM)


def _is_pinned(model: FrontendModel) -> bool:
    return bool(model.report and model.report.is_pinned)


def _ttl_s(model: FrontendModel) -> float:
    return model.queue.settings.ttl_s if model.queue else 0.0


def _running(model: FrontendModel) -> RunningModel:
    url = next((each.engine_url for each in model.router.instances), "")
    shown = model.display_name, model.description
    return RunningModel(model.name, model.state, model.command, url, _ttl_s(model), *shown)


def _own(model: FrontendModel) -> list[str]:
    return [model.name] if model.name else sorted(model.names)


def _described(name: str, model: FrontendModel, facts: ModelFacts) -> OllamaModel:
    card = next(iter(model.cards), {})
    report = model.report
    context = card.get("context_tokens")
    leaves_unix_s = report.leaves_unix_s if report else 0.0
    return OllamaModel(
        name,
        facts,
        loaded_bytes=report.memory_bytes if report else 0,
        is_on_gpu=bool(report and report.gpus),
        context_tokens=context if isinstance(context, int) else 0,
        expires_unix_s=leaves_unix_s or math.inf,
    )


class FactsOfModels:
    """What is known of each model by its files, read once for as long as these stay as they are."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, ModelFacts]] = {}

    async def of(self, model: FrontendModel) -> ModelFacts:
        """Return the facts of a model; files are read in a thread."""
        name = model.name or min(model.names, default="")
        return await asyncio.to_thread(self._read, name, model.worker_options)

    def _read(self, name: str, options: Mapping[str, Any]) -> ModelFacts:
        path = model_path(options)
        try:
            changed_s = path.stat().st_mtime if path else 0.0
        except OSError:
            changed_s = 0.0
        known = self._known.get(name)
        if known is None or known[0] != changed_s:
            self._known[name] = known = changed_s, read_facts(name, options)
        return known[1]


class HeldAnswer:
    """Stands for a request's connection, and holds its whole answer in ``response`` instead of sending it."""

    response = Response.text("")

    async def respond(self, request: Request, response: Response) -> None:
        self.response = response

    async def write(self, data: bytes) -> None:
        raise NotImplementedError("its answer is no stream")

    write_now = write_chunk_now = hold = write


class OllamaConnection:
    """The connection of an Ollama request: OpenAI's events written to it are sent on in Ollama's form."""

    def __init__(self, connection: Answering, asked: Translation, arrived_s: float, *, is_old: bool) -> None:
        self._connection = connection
        self._is_embedding = asked.path == "/v1/embeddings"
        self._is_old = is_old
        now_s = time.monotonic()
        self._answer = ollama_api.OllamaAnswer(asked, arrived_s, now_s, time.time() - now_s)
        self._has_ended = False

    def translated(self, response: Response) -> Response:
        """Return a whole answer in Ollama's words."""
        try:
            document = json.loads(response.body)
        except ValueError:
            return response
        if response.status != 200:
            return Response.json(ollama_api.error_document(sentence_of(document)), response.status)
        now_s = time.monotonic()
        if self._is_embedding:
            found = self._answer.on_embeddings(document, now_s)
            return Response.json(ollama_api.embeddings_of_one(found) if self._is_old else found)
        return Response.json(self._answer.on_document(document, now_s))

    async def respond(self, request: Request, response: Response) -> None:
        await self._connection.respond(request, self.translated(response))

    def start_stream(self, request: Request, headers: Mapping[str, str], status: int = 200) -> None:
        self._connection.start_stream(request, {"Content-Type": "application/x-ndjson"})

    async def write(self, data: bytes) -> None:
        """Send the lines for these events; a comment has none."""
        if lines := self._lines(data):
            await self._connection.write(lines)

    def write_now(self, data: bytes) -> bool:
        return False  # a line is made once: ``write`` follows

    write_chunk_now = hold = write_now

    async def end_stream(self) -> None:
        if not self._has_ended:
            await self._connection.write(self._answer.on_end(time.monotonic()))
        await self._connection.end_stream()

    async def ask_for_body(self) -> None:
        await self._connection.ask_for_body()

    def _lines(self, data: bytes) -> bytes:
        now_s, lines = time.monotonic(), b""
        for line in data.splitlines():
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]":
                self._has_ended = True
                lines += self._answer.on_end(now_s)
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event.get("error") or event.get("object") == "error":
                lines += self._answer.on_failure(sentence_of(event))
            else:
                lines += self._answer.on_event(event, now_s)
        return lines
