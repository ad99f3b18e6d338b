"""Requests that go to an engine as they are: paths of its own, and all below ``/upstream/MODEL/``.

Engines have more paths than any API that is known here (``/props``, ``/infill``, a web page), and a command
may have any. Such a request goes to one model, which is loaded for it as for any other: with its method,
query and body, and nothing is retried. The answer comes back with its status and form. What is not passed:

- headers that are about one connection or about this server: the key, cookies, hosts, origins. So an engine's
  word on which web pages may read its answers is not passed either (``http/browser_policy``)
- what no client may set or make an engine fetch, as on all other paths (``openai_api``)
- paths by which dynaplan itself steers engines: a model that a client puts to sleep would be lost to others

At the top a body is changed by the model's filters, and its ``model`` is the name that the engine knows.
OpenAI's paths below ``/upstream/MODEL`` are answered as at the top.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec.structs import replace

from dynaplan.gateway.client import Client
from dynaplan.gateway.forms import FORM_TYPE
from dynaplan.gateway.frontend_models import FrontendModel, FrontendModels
from dynaplan.gateway.model_queue import LOAD_ONLY_CALL
from dynaplan.gateway.openai_api import (
    API_PATHS,
    ApiError,
    check_passed,
    no_such_path,
    no_worker,
    not_implemented,
    worker_failed,
)
from dynaplan.gateway.passthrough import find_unserved
from dynaplan.gateway.request_bodies import BodyShare
from dynaplan.gateway.request_path import RequestPath
from dynaplan.gateway.routing.worker_router import Booking
from dynaplan.gateway.upstream import EngineAnswer, WorkerDied, WorkerRefused
from dynaplan.http.messages import Request, Response, WholeBody

READ_ONLY = frozenset(
    {"/props", "/slots", "/lora-adapters", "/v1/audio/voices", "/sdapi/v1/loras", "/tokens"}
)
"""Paths for whose GET a model is loaded without being named; any other may be a browser's, for an icon."""

OWN_PATHS = frozenset({*READ_ONLY, "/completion", "/completions", "/embedding", "/embeddings", "/infill"})
"""Paths of engines that are as much like one of OpenAI's as a mistyped one."""

CONTROL_PATHS = frozenset(
    {
        *("/sleep", "/wake_up", "/pause", "/resume", "/pause_generation", "/continue_generation"),
        *("/release_memory_occupation", "/resume_memory_occupation", "/collective_rpc", "/shutdown"),
    }
)
"""Paths by which dynaplan controls engines: 403 for clients, as is what changes a slot, below ``/slots/``."""

_NOT_FORWARDED = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"),
        *("content-length", "expect", "host", "authorization", "proxy-authorization", "x-api-key", "cookie"),
        *("origin", "referer", "x-request-id", "content-encoding"),
    }
)
_NOT_RETURNED = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "trailer", "transfer-encoding", "upgrade"),
        *("content-length", "date", "server", "set-cookie", "x-request-id"),
    }
)
_CORS = "access-control-"

_MAX_WHOLE_BYTES = 256 * 1024
"""The length of an answer up to which it is sent with its length, and not in pieces."""

_WITHOUT_BODY = frozenset({204, 304})


Completions = Callable[[Request], Awaitable[Response | None]]
"""Answers a request for one of OpenAI's paths."""


class EnginePathProxy:
    """Passes on an engine's own paths, and all below ``/upstream/MODEL/``, as they are.

    OpenAI's paths below it are answered by ``completions``, as everywhere.
    """

    def __init__(self, path: RequestPath, completions: Completions) -> None:
        self._path = path
        self._completions = completions

    @property
    def _models(self) -> FrontendModels:
        return self._path.models

    def takes(self, path: str, *, is_slip: bool) -> bool:
        """Tell whether an unknown path may be an engine's; ``is_slip``: it resembles a known path."""
        has_engine = any(each.engine_url for each in self._models.instances)
        return (has_engine or self._models.are_on_demand) and (path in OWN_PATHS or not is_slip)

    async def answer(self, request: Request) -> Response | None:
        """Pass on a request for an engine's own path, to the model that it names, or to the only one."""
        self._path.admission.check_admin(request.headers, request.path)
        with closing(BodyShare(self._path.bodies)) as share:
            body = await self._body(request, share)
            document = _document(body)
            named = str(request.query.get("model") or document.get("model") or _form_model(request, body))
            model = self._model(request, named)
            if document and model.changes_requests_for(named):
                body = json.dumps(model.changed(document)).encode()
            return await self._pass_on(request, model, _relative(request.target), body, document)

    async def answer_upstream(self, request: Request, prefix: str) -> Response | None:
        """Pass ``{prefix}MODEL/PATH`` on to an engine of that model, as PATH.

        Without a slash after MODEL it is redirected. None when a stream was sent already.
        """
        self._path.admission.check_key(request.headers)
        name, rest = self._split(_relative(request.target).removeprefix(prefix))
        if not rest.startswith("/"):
            status = 301 if request.method in ("GET", "HEAD") else 308
            query = urlsplit(request.target).query
            place = f"{prefix}{name}/" + (f"?{query}" if query else "")
            return Response(status, {"Location": place}, b"")
        with closing(BodyShare(self._path.bodies)) as share:
            body = await self._body(request, share)
            model, document = self._models.find(unquote(name)), _document(body)
            path = unquote(rest.partition("?")[0])
            if request.method == "POST" and path in API_PATHS:
                if document.get("model") not in model.names:
                    body = json.dumps({**document, "model": unquote(name)}).encode() if document else body
                return await self._completions(replace(request, path=path, body=WholeBody(body)))
            self._path.admission.check_admin(request.headers, path)
            return await self._pass_on(request, model, rest, body, document)

    def _split(self, target: str) -> tuple[str, str]:
        """Return the name of the model that the target begins with, as it is written, and the rest."""
        path = target.partition("?")[0]
        ends = [at for at, letter in enumerate(path) if letter == "/"] + [len(path)]
        for end in ends:
            if unquote(path[:end]) in self._models.names():
                return path[:end], target[end:]
        name = path.partition("/")[0]
        raise ApiError(
            404,
            f"There is no model {unquote(name)!r} for {path!r}",
            code="model_not_found",
            metric="not_found",
        )

    def _model(self, request: Request, named: str) -> FrontendModel:
        if named:
            return self._models.find(named)
        only = self._models.all[0]
        is_loaded = bool(only.router.instances)
        may_load = request.method == "POST" or request.path in READ_ONLY
        if len(self._models.all) == 1 and (is_loaded or may_load):
            return only
        raise ApiError(
            404,
            f"There is no {request.path} here. For a path of an engine's own name the model: in `model`, or "
            f"by /upstream/MODEL{request.path}",
            code="unknown_url",
            metric="not_found",
        )

    async def _body(self, request: Request, share: BodyShare) -> bytes:
        settings = self._path.settings
        return await Client(request).read_body(
            share, max_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )

    async def _pass_on(
        self, request: Request, model: FrontendModel, target: str, body: bytes, document: Mapping[str, Any]
    ) -> Response | None:
        _check_steering(request, target, model)
        check_passed(document, self._path.settings.allow_media_urls)
        booking = await self._book(model)
        try:
            if not booking.instance.engine_url:
                raise no_such_path(request.path)
            answer = await self._ask(request, booking.instance.engine_url + target, body)
            try:
                return await self._return(request, answer)
            finally:
                answer.close()
        finally:
            booking.close()

    async def _book(self, model: FrontendModel) -> Booking:
        if model.queue:
            return await model.queue.book(model.router, None, None)
        deadline_s = self._path.now_s() + self._path.settings.worker_wait_s
        return await model.router.book(LOAD_ONLY_CALL, deadline_s)

    async def _ask(self, request: Request, url: str, body: bytes) -> EngineAnswer:
        headers = [(name, each) for name, each in request.headers.items() if name not in _NOT_FORWARDED]
        method = "GET" if request.method == "HEAD" else request.method
        try:
            return await self._path.upstream.forward(method, url, headers, body, request.name)
        except WorkerRefused as error:
            raise no_worker(f"The engine does not answer: {error}") from None
        except WorkerDied as error:
            raise worker_failed(f"The engine failed over this request: {error}") from None

    async def _return(self, request: Request, answer: EngineAnswer) -> Response | None:
        if answer.status in (404, 405, 501) and (reason := find_unserved(request.path)):
            raise not_implemented(reason)
        headers = {
            name.decode("latin-1").title(): value.decode("latin-1")
            for name, value in answer.headers
            if name.decode("latin-1") not in _NOT_RETURNED and not name.decode("latin-1").startswith(_CORS)
        }
        length = answer.header("content-length") or ""
        if request.method == "HEAD" or answer.status in _WITHOUT_BODY:
            return Response(answer.status, headers, b"")
        try:
            if length.isdigit() and int(length) <= _MAX_WHOLE_BYTES:
                return Response(answer.status, headers, await answer.read_all())
            connection = request.connection
            connection.start_stream(request, headers, answer.status)
            while piece := await answer.read_some():
                await connection.write(piece)
            await connection.end_stream()
        except WorkerDied as error:
            if length.isdigit() and int(length) <= _MAX_WHOLE_BYTES:
                raise worker_failed(f"The engine failed over this request: {error}") from None
            # the stream is not ended, so that the client sees that it is cut
        return None


def _relative(target: str) -> str:
    """Return path and query of a request's target, which may be a whole address."""
    if target.startswith("/"):
        return target
    parts = urlsplit(target)
    return parts.path + (f"?{parts.query}" if parts.query else "")


def _document(body: bytes) -> Mapping[str, Any]:
    """Return the JSON object that the body is; empty for any other body."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):  # no JSON to us is none to an engine
        return {}
    return document if isinstance(document, dict) else {}


def _form_model(request: Request, body: bytes) -> str:
    """Return the field ``model`` of a form; empty without one."""
    if not request.headers.get("Content-Type").startswith(FORM_TYPE):
        return ""
    _, _, rest = body.partition(b'name="model"\r\n\r\n')
    return rest.partition(b"\r\n")[0].decode("utf-8", "replace")


def _check_steering(request: Request, target: str, model: FrontendModel) -> None:
    path = posixpath.normpath("/" + unquote(target.partition("?")[0]).lstrip("/"))
    if path in CONTROL_PATHS or (path.startswith("/slots/") and request.method != "GET"):
        raise ApiError(
            403,
            f"{path} is how dynaplan steers the engine: see `dynaplan unload {model.name}`",
            kind="permission_error",
            code="steered_by_dynaplan",
        )
