"""Cut a stream of server-sent events where lines end, and find an engine's failure in it.

The patterns that look for a key cannot match inside a JSON text, where the quotes are escaped.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import aiohttp

from dynaplan.gateway.openai_api import ApiError, worker_failed
from dynaplan.gateway.upstream import read_some

LARGEST_HELD_BYTES = 1024 * 1024
"""Bytes of one line that are held back at most; a longer line is passed on in pieces."""

_ABORT = re.compile(rb'"finish_reason":\s*"abort"')
_ERROR = re.compile(rb'^data: *(\{"(?:error"|object": *"error").*)', re.MULTILINE)
_ABORTED = "it aborted the request"


@dataclass(frozen=True)
class Failure:
    """A failure that an engine reports inside its answer, after the status 200.

    ``good`` holds the events before it in the same bytes. ``event`` is the error event to pass on, empty
    for an aborted request. ``status`` is the HTTP status that the failure would have had as an answer of
    its own.
    """

    good: bytes
    message: str
    event: bytes = b""
    status: int = 500
    error: dict[str, Any] | None = None

    @property
    def is_clients_fault(self) -> bool:
        """True when the request is at fault, so that every worker would refuse it."""
        return 400 <= self.status < 500

    def to_api_error(self) -> ApiError:
        """Return the failure as an answer of its own, while nothing has been sent to the client yet."""
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


def failure_in(events: bytes) -> Failure | None:
    """Return the failure in these whole events of a stream; None when there is none."""
    if b'"abort"' not in events and b'"error"' not in events:
        return None
    if found := _ERROR.search(events):
        return _read_error(events[: found.start()], found.group(1))
    if found := _ABORT.search(events):
        return Failure(events[: events.rfind(b"\n", 0, found.start()) + 1], _ABORTED)
    return None


class WholeLines:
    """Reads a stream's bytes as they come, cut where lines end, so that no event is passed on in half."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._held = b""

    async def read(self) -> bytes:
        """Return the next whole lines, empty at the end of the answer; raises WorkerDied."""
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
