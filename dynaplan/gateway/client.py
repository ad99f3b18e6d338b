"""The client's side of one request: its head, its body, and the answer that it gets.

The request path knows the client by this class alone, and no type of the HTTP server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from dynaplan.gateway.request_bodies import BodyShare, receive_body
from dynaplan.util.http_routes import trace_headers
from dynaplan.worker.request_ids import request_id_of

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}


@dataclass(frozen=True)
class WholeAnswer:
    """An answer that is no stream."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """One request of a client, and its answer: either ``start_stream`` and ``write``, or a whole one.

    A client that leaves cancels the task of its request, or raises ConnectionError in what sends to it.
    """

    stream_headers: Mapping[str, str] = _STREAM_HEADERS

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._is_broken_off = False
        self._response: web.StreamResponse | None = None
        self.request_id = request_id_of(request)

    @property
    def response(self) -> web.StreamResponse:
        """What the server is to be given in the end, whatever was sent."""
        return web.Response() if self._response is None else self._response

    @property
    def authorization(self) -> str:
        """The header ``Authorization``; empty without one."""
        return self._request.headers.get("Authorization", "")

    def trace_headers(self) -> Mapping[str, str]:
        """Return the headers of the client's trace; empty without a usable one."""
        return trace_headers(self._request.headers)

    async def read_body(self, share: BodyShare, *, max_bytes: int, timeout_s: float) -> bytes:
        """Return the whole body, decompressed; raises ApiError, as ``receive_body`` does."""
        return await receive_body(self._request, share, max_bytes=max_bytes, timeout_s=timeout_s)

    def note_loaded(self) -> None:
        """Note that the model is there which the request may have waited for."""

    async def start_stream(self) -> None:
        """Send the status 200 and the headers of a stream."""
        self._response = response = web.StreamResponse(headers=self.stream_headers)
        if self._request.version >= aiohttp.HttpVersion11:
            response.enable_chunked_encoding()
        await response.prepare(self._request)

    async def write(self, events: bytes) -> None:
        """Send a part of the stream; wait while the client reads too slowly."""
        assert self._response is not None
        await self._response.write(events)

    async def finish(self, whole: WholeAnswer | None) -> None:
        """Send the whole answer, or the end of the stream unless it is broken off."""
        if whole:
            self._response = web.Response(body=whole.body, status=whole.status, headers=whole.headers)
            await self._response.prepare(self._request)
        if self._response is not None and not self._is_broken_off:
            await self._response.write_eof()

    async def break_off(self, event: bytes) -> None:
        """Send an error event, and close the connection in the middle of the chunked stream.

        So a client cannot take a cut answer for a complete one.
        """
        self._is_broken_off = True
        try:
            await self.write(event)
        except ConnectionError:
            return
        if self._request.transport:
            self._request.transport.close()
