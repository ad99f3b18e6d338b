"""One streamed answer as its client sees it, read as cheaply as it can be.

Of a stream only the times of the first and the last token are kept, and its last events are parsed: they tell
the number of tokens, and whether it came to its end.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp

LAST_EVENTS = 3
"""The events at a stream's end that are parsed: the last token, an empty piece with the reason, the usage."""

EMPTY_TEXTS = (b'"text":""', b'"text": ""')
UNFINISHED = (b'"finish_reason":null', b'"finish_reason": null')

JSON_HEADERS = {"Content-Type": "application/json"}


class RequestFailed(Exception):
    """A request without a whole answer. The first argument names the kind of failure, the second tells it."""


@dataclass(frozen=True)
class TimedAnswer:
    """A whole answer; times are seconds of ``time.perf_counter``.

    ``cached_tokens`` of the prompt came out of a cache, as the engine says.
    """

    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def itl_s(self) -> float | None:
        """The mean time between two tokens; None for an answer of one."""
        if self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


class AnswerStream:
    """A stream of server-sent events as it arrives; ``tokens`` are the events with a token so far."""

    def __init__(self) -> None:
        self.tokens = 0
        self._first_s = self._last_s = 0.0
        self._rest = b""
        self._last: deque[bytes] = deque(maxlen=LAST_EVENTS)
        self._is_done = False

    def take(self, data: bytes, now_s: float) -> int:
        """Add the data that arrived at that time; return the number of its events with a token."""
        before = self.tokens
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._last.append(line)
                if _has_token(line):
                    self._first_s = self._first_s or now_s
                    self._last_s = now_s
                    self.tokens += 1
            elif line.startswith(b"data: [DONE]"):
                self._is_done = True
        return self.tokens - before

    def answer(self) -> TimedAnswer:
        """Return the whole answer; raises RequestFailed when it is cut short, or is an error."""
        last = [_event(line) for line in self._last]
        for event in last:
            if error := event.get("error"):
                raise RequestFailed(f"broke off: {_kind(error)}", _said(error))
        if not self._is_done:
            raise RequestFailed("broke off", "the stream has no end")
        if not self.tokens:
            raise RequestFailed("no tokens", "the stream brought no token")
        usage: Mapping[str, Any] = next(
            (event["usage"] for event in reversed(last) if event.get("usage")), {}
        )
        details = usage.get("prompt_tokens_details") or {}
        return TimedAnswer(
            self._first_s,
            self._last_s,
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or self.tokens),
            int(details.get("cached_tokens") or 0),
        )


def _has_token(line: bytes) -> bool:
    """Tell whether an event brings a token; its text is empty when that is part of a character.

    The piece with the reason for the end, and the usage, bring none.
    """
    if b'"text"' not in line:
        return False
    return not any(empty in line for empty in EMPTY_TEXTS) or any(each in line for each in UNFINISHED)


def _event(line: bytes) -> Mapping[str, Any]:
    try:
        event = json.loads(line[len(b"data: ") :])
    except ValueError:
        raise RequestFailed("broke off", f"an event is no JSON: {line[:100]!r}") from None
    return event if isinstance(event, dict) else {}


def _kind(error: Any) -> str:
    """Return the code of an error, as OpenAI's API has it, or its type."""
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")
    return "error"


def _said(error: Any) -> str:
    return str(error.get("message") if isinstance(error, dict) else error)[:300]


def refusal(status: int, body: str) -> RequestFailed:
    """Return the failure that an answer without tokens is, named ``503 no_worker``."""
    try:
        document = json.loads(body)
        error = document.get("error", document) if isinstance(document, dict) else document
    except ValueError:
        error = body
    kind = _kind(error) if isinstance(error, dict) else ""
    return RequestFailed(
        " ".join(filter(None, (str(status), kind if kind != str(status) else ""))), _said(error)
    )


async def streamed(
    session: aiohttp.ClientSession, url: str, payload: bytes, stream: AnswerStream
) -> TimedAnswer:
    """Post a request and read its stream; raises RequestFailed for everything but a whole answer."""
    import aiohttp

    try:
        async with session.post(url, data=payload, headers=JSON_HEADERS) as response:
            if response.status != 200:
                raise refusal(response.status, await response.text(errors="replace"))
            async for data in response.content.iter_any():
                stream.take(data, time.perf_counter())
    except TimeoutError:
        raise RequestFailed("timed out", f"no whole answer within {session.timeout.total:g} s") from None
    except aiohttp.ClientConnectorError as error:
        raise RequestFailed("cannot connect", str(error)) from None
    except (aiohttp.ClientError, OSError) as error:
        raise RequestFailed("broke off", f"{type(error).__name__}: {error}") from None
    return stream.answer()
