"""A service's endpoints over HTTP: POST with a JSON body, answered by lines as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.http.messages import Answering, BodyTooLarge, InvalidBody, Request, Response
from dynaplan.http.routes import Route
from dynaplan.util.errors import DeadlineExceeded, RequestRefused, TemporaryError, UserError
from dynaplan.worker.deadlines import TIMEOUT_HEADER, deadline_scope, iterate_until, parse_deadline

log = logging.getLogger(__name__)

LINES = "application/x-ndjson"

MODULE_PREFIX = re.compile(r"\b(?:[^\W\d]\w*\.)+")
"""The modules before the names of types in a signature, which a reader of it does not need."""

Handler = Callable[[Request], Awaitable[Response | None]]


@dataclass(frozen=True)
class ServedEndpoint:
    """One endpoint, bound to the service's instance.

    The request's JSON is made into ``request_type`` when that is a dataclass or has pydantic's
    ``model_validate``; else the method gets it as parsed. Other services are answered with one JSON line per
    item. A public endpoint has a route for users besides, on which an item that is a string is sent as it is.
    """

    name: str
    method: Callable[..., Any]
    request_type: type | None = None
    is_public: bool = False


def internal_route(endpoint: ServedEndpoint) -> Route:
    """``POST /{name}``: one line of JSON per item."""
    return Route("POST", f"/{endpoint.name}", _handler(endpoint, LINES, _json_line))


def public_route(endpoint: ServedEndpoint) -> Route:
    """``POST /{name}``: text items as they are, others as lines of JSON."""
    return Route("POST", f"/{endpoint.name}", _handler(endpoint, "text/plain", _text_line))


def check_route(path: str, checks: Sequence[Callable[[], Any]]) -> Route:
    """``GET path``, open: 200 when every check is true, 503 when one is false, 500 when one raises."""

    async def handle(_: Request) -> Response:
        try:
            for check in checks:
                passed = check()
                if not (await passed if inspect.isawaitable(passed) else passed):
                    return Response.text("", 503)
        except Exception as error:
            return Response.text(str(error), 500)
        return Response.text("")

    return Route("GET", path, handle, is_open=True, is_work=False)


async def call_endpoint(endpoint: ServedEndpoint, request: Any) -> AsyncGenerator[Any, None]:
    """Yield the endpoint's answer to the request; a single item when it returns a plain result.

    ``request`` is plain data. Raises UserError when it does not fit the endpoint's request type.
    """
    method = endpoint.method
    answer = method(_parse_request(endpoint, request)) if inspect.signature(method).parameters else method()
    if inspect.isawaitable(answer):
        answer = await answer
    # A response object as Starlette's, which FastAPI has, brings its items along.
    answer = getattr(answer, "body_iterator", answer)
    if not inspect.isasyncgen(answer):
        yield answer
        return
    try:
        async for item in answer:
            yield item
    finally:
        await answer.aclose()


def to_plain(value: Any) -> Any:
    """The value as JSON can carry it: pydantic models and dataclasses become mappings."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value


def _handler(endpoint: ServedEndpoint, content_type: str, line: Callable[[Any], bytes]) -> Handler:
    async def handle(request: Request) -> Response | None:
        try:
            deadline_s = parse_deadline(request.headers.get(TIMEOUT_HEADER))
            body = await _read_body(request)
            items = iterate_until(deadline_s, call_endpoint(endpoint, body), endpoint.name)
            with deadline_scope(deadline_s):
                first = await _first(items)
        except Exception as error:
            return _failure(error, _status_of(error))
        async with contextlib.aclosing(items):
            request.connection.start_stream(request, {"Content-Type": f"{content_type}; charset=utf-8"})
            with deadline_scope(deadline_s):
                await _send(request.connection, first, items, line)
        return None

    return handle


async def _read_body(request: Request) -> Any:
    """Return the request's JSON; None without a body."""
    try:
        body = await request.read()
        charset = request.headers.get("Content-Type").partition("charset=")[2].strip(' "') or "utf-8"
        return json.loads(body.decode(charset)) if body else None
    except BodyTooLarge as error:
        raise RequestRefused(str(error), hint="Send less.", status=413) from error
    except (InvalidBody, ValueError, LookupError, RecursionError) as error:
        raise UserError(f"the request is not JSON: {error}") from error


async def _first(items: AsyncIterator[Any]) -> list[Any]:
    """The first item, if there is one: until it is there, the answer can still be an error's status."""
    try:
        return [await anext(items)]
    except StopAsyncIteration:
        return []


async def _send(
    client: Answering, first: list[Any], items: AsyncIterator[Any], line: Callable[[Any], bytes]
) -> None:
    try:
        for item in first:
            await _write(client, line(item))
        async for item in items:
            await _write(client, line(item))
    except _ClientGone:
        log.debug("the client left before the end of its answer")
        return
    except DeadlineExceeded as error:
        await _write(client, _json_line(_description(error)))
    except Exception as error:
        log.exception("an endpoint failed in the middle of its answer")
        await _write(client, _json_line(_description(error)))
    await client.end_stream()


class _ClientGone(ConnectionError):
    """Nobody reads the answer any more. An endpoint's own ConnectionError is something else."""


async def _write(client: Answering, data: bytes) -> None:
    try:
        await client.write(data)
    except ConnectionError as error:
        raise _ClientGone from error


def _parse_request(endpoint: ServedEndpoint, request: Any) -> Any:
    wanted: Any = endpoint.request_type
    try:
        if hasattr(wanted, "model_validate"):
            # Text is a model's own JSON, as its ``model_dump_json`` makes it.
            is_text = isinstance(request, str)
            return wanted.model_validate_json(request) if is_text else wanted.model_validate(request)
        if _is_dataclass(wanted) and isinstance(request, Mapping):
            return wanted(**request)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the request does not fit {endpoint.name}: {error}", hint=_signature_hint(endpoint)
        ) from error
    return _Request(request, endpoint) if isinstance(request, dict) else request


class _MissingField(UserError, KeyError):
    """A request lacks a field that the endpoint's method asks for; the method may catch it as KeyError."""

    def __str__(self) -> str:
        return f"{self.args[0]}\n  {self.hint}"


class _Request(dict[str, Any]):
    """A request as a plain mapping, which says so when the endpoint's method asks for a field it lacks."""

    def __init__(self, fields: Mapping[str, Any], endpoint: ServedEndpoint) -> None:
        super().__init__(fields)
        self._endpoint = endpoint

    def __missing__(self, field: str) -> Any:
        raise _MissingField(f"the request has no field {field!r}", hint=_signature_hint(self._endpoint))


def _signature_hint(endpoint: ServedEndpoint) -> str:
    """Return a sentence with the signature of an endpoint's method."""
    signature = MODULE_PREFIX.sub("", str(inspect.signature(endpoint.method)).replace("'", ""))
    return f"The endpoint is {endpoint.name}{signature}."


def _is_dataclass(wanted: Any) -> bool:
    return isinstance(wanted, type) and dataclasses.is_dataclass(wanted)


def _description(error: BaseException) -> dict[str, str]:
    return {"error": str(error) or type(error).__name__, "error_type": type(error).__name__}


def _failure(error: Exception, status: int) -> Response:
    if status == 500:
        log.error("an endpoint failed", exc_info=error)
    return Response.json(_description(error), status)


def _status_of(error: Exception) -> int:
    if isinstance(error, UserError):
        return 400
    if isinstance(error, RequestRefused):
        return error.status
    if isinstance(error, DeadlineExceeded):
        return 504
    return 503 if isinstance(error, TemporaryError) else 500


def _json_line(item: Any) -> bytes:
    return json.dumps(to_plain(item), separators=(",", ":")).encode() + b"\n"


def _text_line(item: Any) -> bytes:
    if isinstance(item, bytes):
        return item
    return item.encode() if isinstance(item, str) else _json_line(item)
