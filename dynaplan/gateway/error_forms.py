"""An error in the form of the API that was asked; clients look for their own, and show nothing of another's.

| API | its paths | an answer | in a stream |
|---|---|---|---|
| Anthropic's | ``/v1/messages`` | ``{"type": "error", "error": {"type", "message"}}`` | an event ``error`` |
| Ollama's | its own below ``/api/`` | ``{"error": "a sentence"}`` | a line with the same |
| OpenAI's | all others | ``{"error": {"message", "type", "param", "code"}}`` | ``data:`` with it |

An error comes from the frontend (``ApiError``), or from an engine, in whatever form that has. A request in
Ollama's words is computed as one in OpenAI's, so in its streams errors are translated with the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dynaplan.gateway.ollama_api import error_document, is_ollama
from dynaplan.gateway.openai_api import JSON_TYPE, ApiError
from dynaplan.gateway.passthrough import MESSAGES
from dynaplan.http.messages import Response

_ANTHROPIC_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's types of errors by status; another one is an ``invalid_request_error`` or ``api_error``."""


_OPENAI_ERROR = re.compile(rb'"error":\s*\{')


def error_answer(path: str, error: ApiError) -> Response:
    """Return the answer with that error to a request for that path."""
    headers = {"Content-Type": JSON_TYPE, **error.headers}
    return Response(error.status, headers, error_body(path, error))


def error_body(path: str, error: ApiError) -> bytes:
    """Return the body of an answer with that error."""
    return _written(path, error.status, error.document)


def error_event(path: str, error: ApiError) -> bytes:
    """Return the event that ends a stream with that error."""
    return as_event(path, error_body(path, error))


def as_event(path: str, body: bytes) -> bytes:
    """Return an error's body as an event of a stream."""
    name = b"event: error\n" if _is_anthropic(path) else b""
    return name + b"data: " + body.strip().replace(b"\n", b" ") + b"\n\n"


def translated(path: str, status: int, body: bytes) -> bytes:
    """Return an engine's error in the form of the path; OpenAI's form stays, but on Anthropic's paths."""
    if not _is_anthropic(path) and has_openai_form(body):
        return body
    return _written(path, status, {"message": message_of(body)})


def has_openai_form(body: bytes) -> bool:
    """Tell whether an engine's error has OpenAI's form."""
    return bool(_OPENAI_ERROR.search(body))


def message_of(body: bytes) -> str:
    """Return the sentence of an engine's error: in OpenAI's form, Anthropic's, FastAPI's, or another."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")[:1000].strip() or "The engine failed."
    return sentence_of(document)


def sentence_of(document: Any) -> str:
    """Return the sentence of an engine's error that has been read as JSON."""
    found = document
    for name in ("error", "message", "detail"):
        found = (found.get(name) or found) if isinstance(found, dict) else found
    return found if isinstance(found, str) else json.dumps(found)


def _is_anthropic(path: str) -> bool:
    return f"{path}/".startswith(f"{MESSAGES}/")


def _written(path: str, status: int, error: Mapping[str, Any]) -> bytes:
    if is_ollama(path):
        return json.dumps(error_document(str(error["message"]))).encode()
    fault = "invalid_request_error" if status < 500 else "server_error"
    if _is_anthropic(path):
        kind = _ANTHROPIC_TYPES.get(status, fault if status < 500 else "api_error")
        return json.dumps({"type": "error", "error": {"type": kind, "message": error["message"]}}).encode()
    return json.dumps({"error": {"type": fault, "param": None, "code": None, **error}}).encode()
