"""What a frontend reads in the bytes of an engine's answer: tokens, usage, failures.

The bytes pass on as they are. To parse the JSON of every event would cost more CPU time than to pass it on,
so patterns look for keys; they cannot match inside a JSON text, where the quotes are escaped. All functions
take *whole* events: ``upstream.EngineAnswer`` cuts a stream where lines end.

1. Tokens: an event with a token counts as one; a frame (role, usage, end) as none.
2. Usage: the numbers that the engine states at the end are exact, and come before the counted ones.
3. Failures: engines report them inside a stream, after the status 200, as an error event or as the finish
   reason ``abort``.
4. Errors that are the client's fault, or give advice for another program: engines state them as data
   (``EngineApi.errors``). A prompt longer than the context: every engine has words of its own for it, clients
   look for OpenAI's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from msgspec import Struct

from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway.openai_api import (
    CONTEXT_ADVICE,
    CONTEXT_CODE,
    ApiError,
    ApiPath,
    bad_request,
    not_implemented,
    worker_failed,
)

# -- 1. tokens ---------------------------------------------------------------------------------------

_BACKSLASH = ord("\\")
_EVENT, _NEXT_EVENT = b"data: {", b"\ndata: {"
"""The beginning of the first event and of each further one: a JSON text has no line's end in it."""
_PLAIN_TOKEN = b'"delta":{"content":"'
_PLAIN_ROLE = b'"delta":{"role":"assistant","content":""}'
_MAYBE_NONE = (b'"role":"assistant"', b'"content":null', b'"choices":[]', b'"delta":{}', b'"timings":{')
"""Marks of the events without a token: a stream's first and last ones, and its usage, for all engines.

An event with such a mark may hold a token all the same; ``_TEXT`` finds it.
"""

_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)":"[^"]|"tool_calls":\[\{')
_NUMBER = re.compile(rb'"(prompt|completion|cached|input|output)_tokens":\s*(\d{1,15})(?!\d)')
_NAMED_DELTA = re.compile(rb"^event: \S*delta\r?\n", re.MULTILINE)
_NAMED_END = re.compile(
    rb"^event: (?:message_stop|response\.(?:completed|incomplete|failed))\r?\n",
    re.MULTILINE,
)
_DONE = b"[DONE]"
_ABORT_MARK, _ERROR_MARK = b'"abort"', b'"error"'
"""One of them stands in every failure that an engine reports in a stream."""
_END_BYTES = 16
"""Bytes at the end of a stream in which ``[DONE]`` stands: the mark itself and some white space."""
_TIMINGS = re.compile(rb'"cache_n":(\d{1,15}),"prompt_n":(\d{1,15}),.*?"predicted_n":(\d{1,15})(?!\d)')
_USAGE_BYTES = 1024


def count_chat_tokens(events: bytes) -> int:
    """Return the number of tokens in these whole events of a stream: one per event that is not a frame.

    A frame is an event without a token. vLLM's events with an empty text are tokens: parts of a character.
    """
    count = events.count(_NEXT_EVENT) + events.startswith(_EVENT)
    tokens = events.count(_PLAIN_TOKEN)
    if count == tokens or count == tokens + events.count(_PLAIN_ROLE):
        return tokens
    return count - len(_frames(events))


def count_tokens(endpoint: ApiPath, events: bytes) -> int:
    """Return the number of tokens in these whole events of a stream of that path.

    Responses and messages name their events; what brings text or a thought ends in ``delta``. A line of its
    own cannot be part of a JSON text.
    """
    return len(_NAMED_DELTA.findall(events)) if endpoint.inputs else count_chat_tokens(events)


class TokenFrame:
    """The slices of an event with one token: its ``begin``, its ``text`` and its ``end``, which is ``tail``.

    Engines write the same around the text of nearly every event. So an event that begins and ends like one
    with a token, and has no quote between, has one token, too. To compare takes a third of the time that
    searching takes. The beginning has the answer's id, and each stream keeps its own; streams with the same
    slices and tail share a frame.
    """

    __slots__ = ("begin", "end", "tail", "text")

    def __init__(self, head_bytes: int, tail: bytes) -> None:
        self.begin, self.end = slice(head_bytes), slice(-len(tail), None)
        self.text, self.tail = slice(head_bytes, -len(tail)), tail


_shared_frame = lru_cache(maxsize=64)(TokenFrame)

NO_FRAME = b"\0", TokenFrame(1, b"\0")
"""No event of a stream begins or ends so."""


def find_frame(events: bytes) -> tuple[bytes, TokenFrame] | None:
    """Return what comes before the text of the only token in these events, and their frame.

    None for other events, and where the text has a quote in it.
    """
    if events.count(_NEXT_EVENT) + events.startswith(_EVENT) != 1 or events.count(_PLAIN_TOKEN) != 1:
        return None
    begin = events.find(_PLAIN_TOKEN) + len(_PLAIN_TOKEN)
    end = events.find(b'"', begin)
    is_closing = end >= 0 and events[end - 1] != _BACKSLASH
    return (events[:begin], _shared_frame(begin, events[end:])) if is_closing else None


def is_ended(endpoint: ApiPath, events: bytes) -> bool:
    """Tell whether the last events of a stream of that path end it."""
    return _DONE in events[-_END_BYTES:] or bool(endpoint.inputs and _NAMED_END.search(events))


def _frames(events: bytes) -> set[int]:
    """Return the offsets, in bytes, at which the frames begin."""
    found = set()
    for mark in _MAYBE_NONE:
        at = events.find(mark)
        while at >= 0:
            begin, end = events.rfind(b"\n", 0, at) + 1, events.find(b"\n", at)
            end = len(events) if end < 0 else end
            if events.startswith(_EVENT, begin) and not _TEXT.search(events, begin, end):
                found.add(begin)
            at = events.find(mark, end)
    return found


def as_stream(body: bytes) -> bytes:
    """Return a whole answer as a stream: one event, its choices as those of a stream, and the end mark."""
    try:
        document = json.loads(body)
        for choice in document["choices"]:
            if "message" in choice:
                choice["delta"] = choice.pop("message")
                for index, call in enumerate(choice["delta"].get("tool_calls") or ()):
                    call["index"] = index
        if document.get("object") == "chat.completion":
            document["object"] = "chat.completion.chunk"
        body = json.dumps(document).encode()
    except (ValueError, LookupError, AttributeError, TypeError):
        body = body.replace(b"\r", b" ").replace(b"\n", b" ")
    return b"data: " + body + b"\n\ndata: [DONE]\n\n"


# -- 2. usage ----------------------------------------------------------------------------------------


class Usage(Struct, frozen=True):
    """The numbers of tokens that an answer states; None for a number that it does not state."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


NO_USAGE = Usage()
"""The usage of an answer that states none."""

_NAMES_OF_NUMBERS = {b"input": b"prompt", b"output": b"completion"}
"""The words of the paths ``/v1/responses`` and ``/v1/messages`` -> those of the others."""


def find_usage(answer: bytes) -> Usage:
    """Return the usage that the answer, or the end of a stream, states last.

    llama.cpp, when it is not asked for the usage, states the same numbers as ``timings``.
    """
    begin = answer.rfind(b'"usage":')
    if begin >= 0:
        numbers = _NUMBER.findall(answer[begin : begin + _USAGE_BYTES])
        stated = {_NAMES_OF_NUMBERS.get(name, name): int(digits) for name, digits in numbers}
        if b"completion" in stated or b"prompt" in stated:
            return Usage(stated.get(b"prompt"), stated.get(b"completion"), stated.get(b"cached"))
    begin = answer.rfind(b'"timings":{')
    timings = _TIMINGS.search(answer, begin) if begin >= 0 else None
    if not timings:
        return NO_USAGE
    cached, computed, predicted = map(int, timings.groups())
    return Usage(cached + computed, predicted, cached)


# -- 3. failures -------------------------------------------------------------------------------------

_ABORT = re.compile(rb'"finish_reason":\s*"abort"')
_ERROR = re.compile(
    rb'^(?:event: error\r?\n)?data: *(\{"(?:error"|object": *"error"|type": *"error").*)', re.MULTILINE
)
_ABORTED = "it aborted the request"


@dataclass(frozen=True)
class Failure:
    """A failure that an engine reports inside its answer, after the status 200.

    ``good`` holds the events before it in the same bytes. ``body`` is the engine's error to pass on, empty
    for an aborted request. ``status`` is the HTTP status that the failure would have had as an answer of
    its own.
    """

    good: bytes
    message: str
    body: bytes = b""
    status: int = 500
    error: dict[str, Any] | None = None

    @property
    def is_clients_fault(self) -> bool:
        """True when the request is at fault, so that every worker would refuse it."""
        return 400 <= self.status < 500

    def to_api_error(self) -> ApiError:
        """Return the error to answer with when nothing has been sent to the client yet."""
        error = self.error or {}
        if not self.is_clients_fault:
            return worker_failed(self.message)
        return ApiError(
            self.status,
            self.message,
            kind=str(error.get("type") or "invalid_request_error"),
            code=str(error.get("code") or self.status),
            param=error.get("param"),
        )


def is_aborted(answer: bytes) -> bool:
    """Tell whether the engine aborted the request, in any of its choices."""
    return b'"abort"' in answer and bool(_ABORT.search(answer))


def may_report_failure(events: bytes) -> bool:
    """Tell whether ``find_failure`` is to look at these events."""
    # ``in`` takes five times as long: for bytes it tries its left side as a number first, and fails.
    return events.rfind(_ABORT_MARK) >= 0 or events.rfind(_ERROR_MARK) >= 0


def find_failure(events: bytes) -> Failure | None:
    """Return the failure in these whole events of a stream; None when there is none."""
    if not may_report_failure(events):
        return None
    if found := _ERROR.search(events):
        return _read_error(events[: found.start()], found.group(1))
    if found := _ABORT.search(events):
        return Failure(events[: events.rfind(b"\n", 0, found.start()) + 1], _ABORTED)
    return None


def _read_error(good: bytes, text: bytes) -> Failure:
    try:
        document = json.loads(text)
        error = document["error"] if isinstance(document.get("error"), dict) else document
    except ValueError:
        error = {}
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    message = str(error.get("message") or "its engine failed")
    return Failure(good, message, text.rstrip(), status, error)


# -- 4. errors that are answered otherwise ---------------------------------------------------------------

_MARK = re.compile(
    rb"exceed_context_size_error|maximum context length is \d+ tokens|leaves no room|"
    rb"longer than the model's context length|exceeds the available context size"
)


def corrected_error(api: EngineApi, body: bytes) -> ApiError | None:
    """Return the error to answer in place of an engine's 5xx; None when the engine's own is passed on."""
    if not api.errors:
        return None
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    rule = api.find_error(str(message))
    if rule is None:
        return None
    if rule.status == 501:
        return not_implemented(rule.advice, code=rule.code)
    return ApiError(rule.status, rule.advice or str(message), code=rule.code)


def rewrite_context_error(status: int, body: bytes) -> bytes:
    """Return the body of an engine's answer, or OpenAI's error for a 400 over the context's length."""
    if status != 400 or not _MARK.search(body):
        return body
    try:
        error = json.loads(body)
        error = error.get("error", error)
        message, param = error["message"], error.get("param")
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return body
    if not isinstance(message, str):
        return body
    text = f"{message.rstrip('. ')}. {CONTEXT_ADVICE}"
    return bad_request(text, param=param if isinstance(param, str) else None, code=CONTEXT_CODE).to_json()
