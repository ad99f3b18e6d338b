"""Server-sent events on their way: cut where lines end, and looked at for an engine's failure.

The patterns that look for a key cannot match inside a JSON text, where the quotes are escaped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynaplan.serving.frontend.upstream import read_some
from dynaplan.serving.openai_api import ApiError, worker_failed

LARGEST_HELD_BYTES = 1024 * 1024
"""A line that is longer is passed on in pieces."""

_ABORT = re.compile(rb'"finish_reason":\s*"abort"')
_ERROR = re.compile(rb'^data: *(\{"(?:error"|object": *"error").*)', re.MULTILINE)
_ABORTED = "it aborted the request"


@dataclass(frozen=True)
class Failure:
    """An engine's saying, within its answer, that the answer is none.

    ``good`` is what came before in the same bytes. ``event`` is the error event to pass on, empty for an
    aborted request. ``status`` is the HTTP status that it stands for.
    """

    good: bytes
    message: str
    event: bytes = b""
    status: int = 500
    error: dict[str, Any] | None = None

    @property
    def is_clients_fault(self) -> bool:
        """Whether every worker would say the same."""
        return 400 <= self.status < 500

    def to_api_error(self) -> ApiError:
        """The same as an answer of its own."""
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
    """Whether the engine gave the request up, in one of its choices."""
    return b'"abort"' in answer and bool(_ABORT.search(answer))


def failure_in(events: bytes) -> Failure | None:
    """The failure that these whole events of a stream tell."""
    if b'"abort"' not in events and b'"error"' not in events:
        return None
    if found := _ERROR.search(events):
        return _read_error(events[: found.start()], found.group(1))
    if found := _ABORT.search(events):
        return Failure(events[: events.rfind(b"\n", 0, found.start()) + 1], _ABORTED)
    return None


class WholeLines:
    """The bytes of a stream as they come, cut where lines end: an event is never passed on in half."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._held = b""

    async def read(self) -> bytes:
        """The next whole lines, empty at the end of the answer; raises WorkerDied."""
        chunk = await read_some(self._response)
        if not self._held and chunk.endswith(b"\n"):
            return chunk
        return await self._completed(chunk)

    async def _completed(self, chunk: bytes) -> bytes:
        lines, self._held = self._held + chunk, b""
        while chunk:
            end = lines.rfind(b"\n") + 1 or (len(lines) if len(lines) > LARGEST_HELD_BYTES else 0)
            if end:
                self._held = lines[end:]
                return lines[:end]
            chunk = await read_some(self._response)
            lines += chunk
        return lines


def _read_error(good: bytes, text: bytes) -> Failure:
    try:
        document = json.loads(text)
        error = document["error"] if isinstance(document.get("error"), dict) else document
    except ValueError:
        error = {}
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    message = str(error.get("message") or "its engine failed")
    return Failure(good, message, b"data: " + text.rstrip() + b"\n\n", status, error)
