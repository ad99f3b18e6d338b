"""One request's way to a worker and back: bytes pass through as they come.

Nothing is sent to the client before the first token of a worker's answer is there, so until then another
worker can take over unnoticed. After it, a worker that dies ends the stream with an error event, and the
connection without its proper end: a cut answer never looks complete.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from dynaplan.domain.discovery import Instance
from dynaplan.serving.frontend_metrics import RequestRecord
from dynaplan.serving.limits import Place
from dynaplan.serving.openai_api import Call, worker_failed
from dynaplan.serving.remote_prefill import RemotePrefill
from dynaplan.serving.stream_tokens import tokens_in
from dynaplan.serving.worker_router import Booking, WorkerRouter

log = logging.getLogger(__name__)

MOST_DEATHS = 3
"""How many workers may die over one request: it may be what kills them."""

REFUSALS = frozenset({502, 503, 504})
"""What a worker that leaves, or is not there yet, answers."""

CONNECT_TIMEOUT_S = 2.0

LARGEST_BEGINNING_BYTES = 64 * 1024
"""A stream without a token is passed on from there."""

_TAIL_BYTES = 512
_DONE = b"[DONE]"
_JSON = "application/json"
_PASSED_ON = ("Retry-After",)
_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


class WorkerRefused(Exception):
    """The worker did not touch the request."""


class WorkerDied(Exception):
    """The worker went away in the middle of the request, before the client got anything of its answer."""


@dataclass
class Exchange:
    """One accepted request, until it is answered."""

    request: web.BaseRequest
    call: Call
    place: Place
    record: RequestRecord
    tail: bytes = b""
    """The end of the answer, where an engine states its usage."""
    failure: str = ""
    """Why the answer, begun already, is not complete: the ``error_type`` of the metrics."""

    def answering(self) -> None:
        """The first byte of the answer has arrived."""
        self.place.leave()
        self.record.answering()


def new_session() -> aiohttp.ClientSession:
    """The connections to the workers: as many as requests need, kept open, never timed out as a whole."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, use_dns_cache=True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )


class Forwarder:
    """Answers requests by way of the workers that the router chooses."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        router: WorkerRouter,
        prefill: RemotePrefill,
        *,
        worker_token: str,
        worker_wait_s: float,
    ) -> None:
        self._session = session
        self._router = router
        self._prefill = prefill
        self._authorization = f"Bearer {worker_token}"
        self._worker_wait_s = worker_wait_s
        self._now_s: Callable[[], float] = asyncio.get_running_loop().time

    async def answer(self, exchange: Exchange) -> web.StreamResponse:
        """The worker's answer, sent already if it is a stream; raises ApiError when no worker gives one."""
        body: bytes | None = None
        deaths = 0
        deadline_s = self._now_s() + self._worker_wait_s
        while True:
            booking = await self._router.book(exchange.call, deadline_s)
            try:
                if body is None:
                    body = await self._prefilled_body(exchange.call, booking)
                    deadline_s = self._now_s() + self._worker_wait_s
                return await self._attempt(exchange, booking, body)
            except WorkerRefused as reason:
                log.debug("%s refused a request: %s", booking.instance.worker, reason)
                self._router.avoid(booking.instance)
            except WorkerDied as reason:
                log.info("%s died over a request: %s", booking.instance.worker, reason)
                self._router.avoid(booking.instance)
                deaths += 1
                deadline_s = self._now_s() + self._worker_wait_s
                if deaths == MOST_DEATHS:
                    raise worker_failed(f"{deaths} workers died over this request") from None
            finally:
                booking.close()

    async def _prefilled_body(self, call: Call, booking: Booking) -> bytes:
        params = await self._prefill.hand_off(call, booking.prefix_hit_rate)
        return call.body if params is None else call.body_with(params)

    async def _attempt(self, exchange: Exchange, booking: Booking, body: bytes) -> web.StreamResponse:
        upstream = await self._sent(exchange.call, booking.instance, body)
        try:
            if upstream.status in REFUSALS:
                raise WorkerRefused(f"status {upstream.status}")
            if upstream.status != 200 or not exchange.call.is_stream:
                return await self._whole(exchange, upstream)
            first = await _beginning(upstream)
            booking.prefilled()
            return await _streamed(exchange, upstream, first)
        finally:
            upstream.close()  # gives a connection back whose answer was read to its end

    async def _sent(self, call: Call, instance: Instance, body: bytes) -> aiohttp.ClientResponse:
        headers = {
            "Authorization": self._authorization,
            "Content-Type": _JSON,
            "X-Request-Id": uuid.uuid4().hex,
        }
        try:
            return await self._session.post(instance.url + call.endpoint.path, data=body, headers=headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise WorkerRefused(str(error)) from None
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise WorkerDied(str(error) or type(error).__name__) from None

    async def _whole(self, exchange: Exchange, upstream: aiohttp.ClientResponse) -> web.Response:
        try:
            body = await upstream.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise WorkerDied(str(error)) from None
        exchange.answering()
        exchange.tail = body[-_TAIL_BYTES:]
        exchange.failure = _error_type(upstream.status)
        headers = {name: upstream.headers[name] for name in _PASSED_ON if name in upstream.headers}
        headers["Content-Type"] = upstream.headers.get("Content-Type", _JSON)
        return web.Response(body=body, status=upstream.status, headers=headers)


def _error_type(status: int) -> str:
    """The ``error_type`` of the metrics for a worker's whole answer."""
    if status < 400:
        return ""
    if status == 429:
        return "overload"
    return "validation" if status < 500 else "internal"


async def _streamed(exchange: Exchange, upstream: aiohttp.ClientResponse, first: bytes) -> web.StreamResponse:
    """Pass the stream on. The client's leaving shows as this task's cancellation, or as a ConnectionError."""
    exchange.answering()
    response = web.StreamResponse(headers=_STREAM_HEADERS)
    if exchange.request.version >= aiohttp.HttpVersion11:
        response.enable_chunked_encoding()
    await response.prepare(exchange.request)
    chunk, reason = first, "its stream ended early"
    try:
        while chunk:
            exchange.record.streamed(chunk)
            exchange.tail = chunk if len(chunk) >= _TAIL_BYTES else (exchange.tail + chunk)[-_TAIL_BYTES:]
            await response.write(chunk)
            chunk = await _read(upstream)
    except WorkerDied as death:
        reason = str(death)
    if _DONE not in exchange.tail[-len(_DONE) - 4 :]:
        exchange.failure = "internal"
        await _break_off(exchange.request, response, f"The worker died over this request: {reason}")
    return response


async def _beginning(upstream: aiohttp.ClientResponse) -> bytes:
    """The stream up to its first token: what comes before it commits nobody to this worker."""
    beginning = b""
    while chunk := await _read(upstream):
        beginning += chunk
        if tokens_in(beginning, is_beginning=True) > 0 or len(beginning) > LARGEST_BEGINNING_BYTES:
            return beginning
    if _DONE not in beginning:
        raise WorkerDied("its stream ended before the first token")
    return beginning


async def _read(upstream: aiohttp.ClientResponse) -> bytes:
    """The next bytes; empty at the end of the answer."""
    try:
        return await upstream.content.readany()
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise WorkerDied(str(error) or type(error).__name__) from None


async def _break_off(request: web.BaseRequest, response: web.StreamResponse, message: str) -> None:
    """Say why, and close the connection in the middle of the chunked answer."""
    await response.write(b"data: " + worker_failed(message).to_json() + b"\n\n")
    if request.transport:
        request.transport.close()
