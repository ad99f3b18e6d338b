"""A worker's answer on its way to the client: bytes pass through as they come.

An answer that fails after it has begun ends with an error event, and the connection without its proper end:
a cut answer never looks complete.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from dynaplan.serving.frontend.admission import Place
from dynaplan.serving.frontend.metrics import RequestRecord
from dynaplan.serving.frontend.stream_events import WholeLines, failure_in, is_aborted
from dynaplan.serving.frontend.stream_tokens import tokens_in
from dynaplan.serving.frontend.upstream import WorkerDied, read_whole
from dynaplan.serving.openai_api import NO_BLOCKS, Call, PromptBlocks, worker_failed
from dynaplan.serving.prefill.hand_off import HandOff

LARGEST_BEGINNING_BYTES = 64 * 1024
"""A stream without a token is passed on from there."""

_DONE = b"[DONE]"
_END_BYTES = 16
_LAST_READS = 8
"""The last event, the usage, the end, and between them empty lines: each may come by itself."""

_JSON = "application/json"
_PASSED_ON = ("Retry-After",)
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass
class Exchange:
    """One accepted request, until it is answered."""

    request: web.BaseRequest
    call: Call
    place: Place
    record: RequestRecord
    hand_off: HandOff | None = None
    """Where the prompt was computed, if not at the worker that answers."""
    blocks: PromptBlocks = NO_BLOCKS
    usage: bytes = b""
    """The part of the answer where an engine states its usage."""
    failure: str = ""
    """Why the answer, begun already, is not complete: the ``error_type`` of the metrics."""

    def answering(self) -> None:
        """The first token of the answer has arrived."""
        self.place.leave()
        self.record.answering()
        self.let_go()

    def let_go(self) -> None:
        """The hand-off is taken, or nobody wants it any more."""
        if self.hand_off:
            self.hand_off.release()
            self.hand_off = None


async def beginning(lines: WholeLines) -> bytes:
    """The stream up to its first token: what comes before it commits nobody to this worker.

    Raises WorkerDied; ApiError when the engine says that the request is at fault.
    """
    begun = b""
    while events := await lines.read():
        if failure := failure_in(events):
            if failure.is_clients_fault:
                raise failure.to_api_error()
            raise WorkerDied(failure.message)
        begun += events
        if tokens_in(begun) > 0 or len(begun) > LARGEST_BEGINNING_BYTES:
            return begun
    if _DONE not in begun:
        raise WorkerDied("its stream ended before the first token")
    return begun


async def streamed(exchange: Exchange, lines: WholeLines, first: bytes) -> web.StreamResponse:
    """Pass the stream on. The client's leaving shows as this task's cancellation, or as a ConnectionError."""
    exchange.answering()
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    if exchange.request.version >= aiohttp.HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(exchange.request)
    reason = "its stream ended early"
    last, events = deque[bytes](maxlen=_LAST_READS), first
    try:
        while events:
            if failure_in(events):
                return await _failed(exchange, response, events)
            exchange.record.streamed(events)
            last.append(events)
            await response.write(events)
            events = await lines.read()
    except WorkerDied as death:
        reason = str(death)
    exchange.usage = b"".join(last)
    if _DONE not in exchange.usage[-_END_BYTES:]:
        exchange.failure = "internal"
        await _break_off(exchange.request, response, _died(reason))
    return response


async def whole(exchange: Exchange, upstream: aiohttp.ClientResponse) -> web.Response:
    """An answer that is no stream, whatever its status; raises WorkerDied."""
    body = await read_whole(upstream)
    if upstream.status == 200 and is_aborted(body):
        raise WorkerDied("it aborted the request")
    exchange.answering()
    exchange.usage = body
    exchange.failure = _error_type(upstream.status)
    headers = {name: upstream.headers[name] for name in _PASSED_ON if name in upstream.headers}
    headers["Content-Type"] = upstream.headers.get("Content-Type", _JSON)
    return web.Response(body=body, status=upstream.status, headers=headers)


async def _failed(exchange: Exchange, response: web.StreamResponse, events: bytes) -> web.StreamResponse:
    """The engine says in the middle of its stream that it failed: so does ours, in the engine's words."""
    failure = failure_in(events)
    assert failure
    exchange.failure = _error_type(failure.status)
    exchange.record.streamed(failure.good)
    await response.write(failure.good)
    await _break_off(exchange.request, response, failure.event or _died(failure.message))
    return response


def _died(reason: str) -> bytes:
    error = worker_failed(f"The worker died over this request: {reason}")
    return b"data: " + error.to_json() + b"\n\n"


async def _break_off(request: web.BaseRequest, response: web.StreamResponse, event: bytes) -> None:
    """Say why, and close the connection in the middle of the chunked answer."""
    await response.write(event)
    if request.transport:
        request.transport.close()


def _error_type(status: int) -> str:
    """The ``error_type`` of the metrics for a worker's status."""
    if status < 400:
        return ""
    if status == 429:
        return "overload"
    return "validation" if status < 500 else "internal"
