"""Request bodies: received within a memory budget, and read in a separate process when they are large.

``BodyBudget`` bounds the memory of all bodies together, ``receive_body`` takes one from a client within its
limits, and ``BodyReader`` makes a checked ``Call`` of it, or translates it from Ollama's API: at once when it
is small, in a process of its own when it is large (``body_reader_main``). ``json.loads`` holds the GIL for
the whole document, so that a thread would stall the streams of others too: 10 MB of token ids take 0.3 s,
10 MB of empty lists several seconds.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from typing import Any

from dynaplan.gateway import ollama_api, timing
from dynaplan.gateway.ollama_api import Translation
from dynaplan.gateway.openai_api import ApiError, ApiPath, Call, bad_request, parse_call
from dynaplan.http.messages import InvalidBody, Request
from dynaplan.process.helper import HelperFailed, HelperLimits, HelperProcess, HelperTimeout

log = logging.getLogger(__name__)

MAX_UNCOUNTED_BYTES = 64 * 1024
"""Bodies up to this size are not counted, so that a client which fills the budget cannot block small ones.

Their number is bounded by the number of connections.
"""


class BodyBudget:
    """Counts the bytes of the large bodies that are in memory, received in whole or in part."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held_bytes = 0

    def check(self, more_bytes: int) -> None:
        """Raise ApiError (503) when that many bytes more would exceed the budget."""
        if self.held_bytes + more_bytes > self._max_bytes:
            raise ApiError(
                503,
                f"This frontend already buffers {self.held_bytes} bytes of request bodies; the limit is "
                f"{self._max_bytes} (Frontend.max-bodies-bytes). Try again.",
                kind="service_unavailable",
                code="bodies_full",
                metric="overload",
                headers={"Retry-After": "2", "Connection": "close"},
            )


class BodyShare:
    """The part of the budget that one body takes until ``close``: nothing while it is small."""

    __slots__ = ("_budget", "counted_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.counted_bytes = 0

    def close(self) -> None:
        self._budget.held_bytes -= self.counted_bytes

    def check(self, size_bytes: int) -> None:
        """Raise ApiError (503) when a body of that size would exceed the budget now."""
        if size_bytes > MAX_UNCOUNTED_BYTES:
            self._budget.check(size_bytes - self.counted_bytes)

    def grow_to(self, size_bytes: int) -> None:
        """Count the body with that size from now on; raises ApiError (503) when the budget is used up."""
        if size_bytes > MAX_UNCOUNTED_BYTES:
            self.check(size_bytes)
            self._budget.held_bytes += size_bytes - self.counted_bytes
            self.counted_bytes = size_bytes


_CLOSE = {"Connection": "close"}


async def receive_body(request: Request, share: BodyShare, *, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body, decompressed.

    Raises ApiError: 413 for a body that is too large, 408 for one that takes too long, 503 when the bodies of
    other requests leave no room, 400 for one that does not match its headers. Content-Length is checked
    before anything is received.
    """
    declared_bytes = request.body.declared_bytes
    if declared_bytes > max_bytes:
        raise _too_large(max_bytes)
    share.check(declared_bytes)
    try:
        if request.body.is_complete and (body := request.body.take_whole()):  # there is nothing to wait for
            _count(len(body), share, max_bytes)
            return body
        if request.headers.get("expect").lower() == "100-continue":
            await request.connection.ask_for_body()
        async with asyncio.timeout(timeout_s):
            return await _receive(request, share, max_bytes)
    except TimeoutError:
        raise ApiError(
            408, f"The body was not complete after {timeout_s:g} s", code="body_timeout", headers=_CLOSE
        ) from None
    except InvalidBody as invalid:
        raise ApiError(
            400,
            f"The body cannot be read: {invalid}. Send what Content-Length and Content-Encoding promise.",
            code="invalid_body",
            headers=_CLOSE,
        ) from None


async def _receive(request: Request, share: BodyShare, max_bytes: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while piece := await request.body.read():
        size += len(piece)
        _count(size, share, max_bytes)
        pieces.append(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _count(size_bytes: int, share: BodyShare, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise _too_large(max_bytes)
    share.grow_to(size_bytes)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {max_bytes} bytes (Frontend.max-body-bytes)",
        code="body_too_large",
        headers=_CLOSE,
    )


MAX_INLINE_PARSE_BYTES = 256 * 1024
"""Larger bodies, in bytes, are parsed in the process. The worst of this size take about 15 ms."""


PARSER_MODULE = "dynaplan.gateway.body_reader_main"
"""The module that the process runs."""


BASE_MEMORY_BYTES = 512 * 1024 * 1024
MEMORY_PER_BYTE = 48
"""Memory that the process may take: the base, and this for every byte of the largest body.

``[{"":0},{"":0},...]`` takes 34 bytes of memory per byte of JSON.
"""


BASE_ANSWER_BYTES = 1 << 24


class BodyReader:
    """Reads bodies: large ones in a process of its own, one at a time.

    The process is started when needed and ended when idle. After a timeout, or when the client of the body
    that it reads leaves, it is killed; the next large body starts another one. Its memory suffices for bodies
    of ``max_bytes``.
    """

    def __init__(self, max_bytes: int) -> None:
        memory_bytes = BASE_MEMORY_BYTES + MEMORY_PER_BYTE * max_bytes
        self._helper = HelperProcess(
            PARSER_MODULE,
            (),
            HelperLimits(
                timing.BODY_READER_TIMEOUT_S,
                memory_bytes,
                idle_s=timing.BODY_READER_IDLE_S,
                # A translated body is its answer: a letter of 2 bytes becomes 6, as \u00e4.
                answer_bytes=BASE_ANSWER_BYTES + 3 * max_bytes,
            ),
        )
        self._lock = asyncio.Lock()

    async def read(self, endpoint: ApiPath, body: bytes) -> Call:
        """Return the checked request; raises ApiError if it is invalid.

        For a large body ``document`` lacks the prompt, and ``prompt`` is its beginning.
        """
        if len(body) <= MAX_INLINE_PARSE_BYTES:
            return parse_call(endpoint, body)
        answer, prompt = await self._ask({"path": endpoint.path}, body)
        return _call_from_answer(endpoint, body, answer, prompt)

    async def translate(self, path: str, body: bytes) -> tuple[Translation, bytes]:
        """Translate a request of Ollama's API, as ``ollama_api.translate`` does."""
        if len(body) <= MAX_INLINE_PARSE_BYTES:
            return ollama_api.translate(path, body)
        answer, translated = await self._ask({"path": path, "is_ollama": True}, body)
        return Translation(**answer), translated

    async def _ask(self, question: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Return the answer of the process; raises ApiError."""
        async with self._lock:
            try:
                answer, payload = await self._helper.ask(question, body)
            except HelperTimeout:
                raise bad_request(
                    f"The body could not be read within {timing.BODY_READER_TIMEOUT_S:g} s",
                    code="body_too_complex",
                ) from None
            except HelperFailed as failure:
                log.warning("a large body was not read, its reader has ended: %s", failure)
                raise _reader_ended() from None
            except asyncio.CancelledError:  # the client has gone: the next body need not wait for this one
                await self._helper.end()
                raise
        if error := answer.get("error"):
            raise ApiError(answer["status"], error.pop("message"), kind=error.pop("type"), **error)
        return answer, payload

    async def close(self) -> None:
        """End the process; requests that wait for it are answered 503."""
        await self._helper.close()


def _reader_ended() -> ApiError:
    return ApiError(
        503,
        "The process that reads large bodies has ended. Try again.",
        kind="service_unavailable",
        code="body_not_read",
        metric="internal",
        headers={"Retry-After": "1"},
    )


def _call_from_answer(endpoint: ApiPath, body: bytes, answer: dict[str, Any], prompt: bytes) -> Call:
    return Call(
        endpoint=endpoint,
        body=body,
        document=answer["document"],
        model=answer["model"],
        is_stream=answer["is_stream"],
        prompt=prompt.decode("utf-8", "surrogatepass") if answer["is_text"] else tuple(array("Q", prompt)),
        prompt_tokens=answer["prompt_tokens"],
        is_whole=False,
        prompts=answer["prompts"],
        address=answer["address"],
        has_media=answer["has_media"],
    )
