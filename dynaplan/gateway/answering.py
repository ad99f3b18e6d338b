"""Pass a worker's answer on to the client, byte for byte as it comes.

An answer that fails after it has begun ends with an error event and then a connection closed in the middle of
the chunked encoding, so that a client cannot take a cut answer for a complete one.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import aiohttp
from aiohttp import web

from dynaplan.engines.api_rules import EngineApi
from dynaplan.gateway.admission import Place
from dynaplan.gateway.context_errors import in_openai_words
from dynaplan.gateway.metrics import RequestRecord
from dynaplan.gateway.migration.begun_streams import BegunStream
from dynaplan.gateway.migration.partial_answers import UnreadPages
from dynaplan.gateway.openai_api import (
    CHAT_COMPLETIONS,
    NO_BLOCKS,
    ApiError,
    ApiPath,
    Call,
    PromptBlocks,
    no_such_path,
    worker_failed,
)
from dynaplan.gateway.prefill.hand_off import HandOff
from dynaplan.gateway.reporting.tracing import RequestTrace
from dynaplan.gateway.routing.booking import BookEntry
from dynaplan.gateway.stream_events import Failure, WholeLines, failure_in, is_aborted
from dynaplan.gateway.stream_tokens import Usage, counted, is_ended, usage_in
from dynaplan.gateway.trials import Trial
from dynaplan.gateway.upstream import WorkerDied, read_whole
from dynaplan.util.http_routes import trace_headers

LARGEST_BEGINNING_BYTES = 64 * 1024
"""Bytes of a stream that are held back at most while no token is found in them."""

_DONE_EVENT = b"data: [DONE]\n\n"

_LAST_READS = 8
"""Reads kept from the end of a stream, to find the usage in.

The last event, the usage and ``[DONE]`` may each arrive in a read of its own, with empty lines between them.
"""

_JSON = "application/json"
_NO_SUCH_PATH = (404, 405)
_OPENAI_ERROR = re.compile(rb'"error":\s*\{')
_PASSED_ON = ("Retry-After",)
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


NO_BOUNDS = EngineApi()

_UNTRACED = nullcontext()


@dataclass
class Exchange:
    """One accepted request with everything that is known about it until it is answered."""

    request: web.BaseRequest
    call: Call
    place: Place
    record: RequestRecord
    hand_off: HandOff | None = None
    """The remotely computed prompt, until the answering worker has taken it over; None without one."""
    prefilled: HandOff | None = None
    """The remotely computed prompt of the attempt that is under way or was the last."""
    blocks: PromptBlocks = NO_BLOCKS
    booking: BookEntry | None = None
    """The request in the book of the worker that is tried."""
    api: EngineApi = NO_BOUNDS
    """The API of the engine that is tried."""
    trial: Trial | None = None
    """The attempt that is under way."""
    usage: bytes = b""
    """The end of the answer, in which an engine states its usage."""
    worker: str = ""
    """The worker that is tried, or was the last."""
    failure: str = ""
    """The ``error_type`` of the metrics when an answer that had begun was not completed; else empty."""
    migration_limit: int = 0
    """Times that the answer may go on at another worker."""
    pages: UnreadPages = field(default_factory=UnreadPages)
    """The room for what is kept of streams that may."""
    trace: RequestTrace | None = None
    """The spans of the request, where it is traced here."""
    begun: BegunStream | None = None
    """The client's stream, once it has begun; ``call`` is then what the worker that is tried is asked for."""

    @property
    def asked(self) -> Call:
        """The client's own request."""
        return self.begun.asked if self.begun else self.call

    def step(self, name: str, worker: str = "") -> AbstractContextManager[None]:
        """Return a step of the request's trace, for a ``with`` block."""
        if self.trace is None:
            return _UNTRACED
        return self.trace.step(name, {"dynaplan.worker": worker} if worker else {})

    def trace_headers(self) -> Mapping[str, str]:
        """Return the headers of the trace for another process: of the step, or as the client sent them."""
        return self.trace.headers() if self.trace else trace_headers(self.request.headers)

    def waiting(self, patience: asyncio.Timeout | None) -> None:
        """Note that the attempt waits for the beginning of an answer, which ``patience`` can end, or not."""
        if self.trial:
            self.trial.patience = patience

    def answering(self) -> None:
        """Note that the first token of the answer has arrived."""
        self.waiting(None)
        self.place.leave()
        self.record.answering()
        self.let_go()
        if self.trial:
            self.trial.answering(is_good=not self.failure)

    def booked(self, booking: BookEntry, blocks: PromptBlocks) -> None:
        """Note the request's booking; the number of its tokens is exact now if the router knows them."""
        self.booking = booking
        if self.begun is None:
            self.blocks = blocks
        if blocks.prompt_tokens not in (0, self.call.prompt_tokens):
            self.call = replace(self.call, prompt_tokens=blocks.prompt_tokens)

    def grow(self) -> None:
        """Book the blocks that the answer has filled so far."""
        if self.booking and self.record.output_tokens >= self.booking.grows_at_tokens:
            self.booking.decoded(self.record.output_tokens)

    def worker_died(self, death: WorkerDied) -> None:
        """Note against the request that its worker has died, if that is what the failure means."""
        if self.trial and death.is_connection_lost:
            self.trial.died()

    def stated(self) -> Usage:
        """Return the usage that the answer states, and of a remote prompt what the prefill worker had cached.

        To the decode worker's engine all that it took over is cached.
        """
        stated = usage_in(self.usage)
        return replace(stated, cached_tokens=self.prefilled.cached_tokens) if self.prefilled else stated

    def reused(self, instance_id: int) -> tuple[int, int]:
        """Return the instance whose cache the prompt had use of, and the tokens of it that were there.

        ``instance_id`` is the decode worker's, of whose cache the booking says what the router knows.
        """
        if self.prefilled:
            return self.prefilled.instance_id, self.prefilled.cached_tokens or 0
        booking = self.booking
        return instance_id, booking.overlap_blocks * booking.block_tokens if booking else 0

    def let_go(self) -> None:
        """Release the hand-off: the engine has taken it over, or no engine will."""
        if self.hand_off:
            self.hand_off.release()
            self.hand_off = None


async def beginning(
    lines: WholeLines, api: EngineApi = NO_BOUNDS, endpoint: ApiPath = CHAT_COMPLETIONS
) -> bytes:
    """Read the stream up to its first token, after which the request cannot move to another worker.

    Raises WorkerDied when the stream ends or fails before, and ApiError when the engine says that the request
    itself is at fault.
    """
    begun = b""
    while events := await lines.read():
        if failure := failure_in(events):
            if failure.is_clients_fault:
                raise failure.to_api_error()
            raise WorkerDied(failure.message, is_connection_lost=api.reports_death(failure.message))
        begun += events
        if counted(endpoint, begun) > 0 or len(begun) > LARGEST_BEGINNING_BYTES:
            return begun
    if not is_ended(endpoint, begun):
        raise WorkerDied("its stream ended before the first token")
    return begun


async def streamed(exchange: Exchange, lines: WholeLines, first: bytes) -> web.StreamResponse:
    """Pass the stream on, beginning with ``first``, and return the response when it has ended.

    Raises WorkerDied when the worker dies and another one can go on, with that one's request as the
    exchange's ``call``. A client that disconnects cancels this task or raises ConnectionError in it.
    """
    if exchange.prefilled and exchange.begun is None:
        exchange.prefilled.answering()
    exchange.answering()
    begun = exchange.begun = exchange.begun or await _begin(exchange)
    failure: Failure | None = None
    cut_short = WorkerDied("its stream ended early")
    last, events = deque[bytes](maxlen=_LAST_READS), first
    try:
        while events and not (failure := failure_in(events)):
            passed_on = await begun.write(events)
            exchange.record.streamed(passed_on, exchange.call.endpoint)
            exchange.grow()
            last.append(passed_on)
            events = await lines.read()
    except WorkerDied as death:
        cut_short = death
        exchange.worker_died(death)
    if failure:
        await _failed(exchange, begun, failure)
        return begun.response
    exchange.usage = b"".join(last)
    if not is_ended(exchange.call.endpoint, exchange.usage):
        await _cut(exchange, begun, cut_short)
    return begun.response


async def whole(exchange: Exchange, upstream: aiohttp.ClientResponse) -> web.Response:
    """Read an answer that is not a stream and turn it into ours, whatever its status; raises WorkerDied."""
    body = await read_whole(upstream)
    if upstream.status == 200 and is_aborted(body):
        raise WorkerDied("it aborted the request")
    if exchange.call.endpoint.inputs and upstream.status in _NO_SUCH_PATH and not _OPENAI_ERROR.search(body):
        raise no_such_path(exchange.call.endpoint.path)
    exchange.failure = _error_type(upstream.status)
    exchange.answering()
    exchange.usage = body
    headers = {name: upstream.headers[name] for name in _PASSED_ON if name in upstream.headers}
    headers["Content-Type"] = upstream.headers.get("Content-Type", _JSON)
    body = in_openai_words(upstream.status, body)
    return web.Response(body=body, status=upstream.status, headers=headers)


async def broken_off(exchange: Exchange, begun: BegunStream, error: ApiError) -> web.StreamResponse:
    """End a stream that has begun with an error event, and return its response."""
    exchange.failure = error.metric
    await _break_off(exchange.request, begun.response, b"data: " + error.to_json() + b"\n\n")
    return begun.response


async def _begin(exchange: Exchange) -> BegunStream:
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    if exchange.request.version >= aiohttp.HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(exchange.request)
    return BegunStream(response, exchange.call, exchange.api, exchange.migration_limit, exchange.pages)


async def _cut(exchange: Exchange, begun: BegunStream, death: WorkerDied, event: bytes = b"") -> None:
    """End a stream whose worker died in the middle; raises the death when another worker can go on.

    ``event`` is the error event that the engine has sent, if any.
    """
    if begun.is_complete():
        await begun.response.write(_DONE_EVENT)
        return
    tokens = exchange.record.output_tokens
    obstacle = begun.obstacle(tokens, exchange.api)
    if not obstacle:
        exchange.call = begun.migrate(tokens, exchange.api)
        exchange.record.migrated()
        raise death
    exchange.failure = "internal"
    await _break_off(exchange.request, begun.response, event or _died(f"{death}; {obstacle}"))


async def _failed(exchange: Exchange, begun: BegunStream, failure: Failure) -> None:
    """End the stream with the error that the engine reported in the middle of its own, or go on elsewhere.

    Another worker can go on when this one has aborted the answer, as one does that must end, or is dead.
    """
    exchange.record.streamed(await begun.write(failure.good), exchange.call.endpoint)
    death = WorkerDied(failure.message, is_connection_lost=exchange.api.reports_death(failure.message))
    exchange.worker_died(death)
    if death.is_connection_lost or not failure.event:
        await _cut(exchange, begun, death, failure.event)
        return
    exchange.failure = _error_type(failure.status)
    await _break_off(exchange.request, begun.response, failure.event)


def _died(reason: str) -> bytes:
    error = worker_failed(f"The worker died over this request: {reason}")
    return b"data: " + error.to_json() + b"\n\n"


async def _break_off(request: web.BaseRequest, response: web.StreamResponse, event: bytes) -> None:
    """Send the error event and close the connection in the middle of the chunked answer."""
    await response.write(event)
    if request.transport:
        request.transport.close()


def _error_type(status: int) -> str:
    """Return the ``error_type`` label for the HTTP status of a worker's answer."""
    if status < 400:
        return ""
    if status == 429:
        return "overload"
    return "validation" if status < 500 else "internal"
