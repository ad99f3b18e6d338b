"""The client's side of one request: its head, its body, and the answer that it gets.

The request path knows the client by this class alone, and no type of the HTTP server.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dynaplan.gateway.request_bodies import MAX_UNCOUNTED_BYTES, BodyShare, receive_body
from dynaplan.http.messages import Headers, Request, Response
from dynaplan.http.trace import NO_TRACE, TRACE_PARENT, TRACE_STATE, trace_headers

_STREAM_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_TRACE_PARENT = TRACE_PARENT.lower().encode()

WholeAnswer = Response
"""An answer that is no stream."""


class Client:
    """One request of a client, and its answer: a stream (``start_stream``, ``write``), or one whole answer.

    A client that leaves cancels the task of its request, or raises ConnectionError in what sends to it.
    """

    __slots__ = ("_is_broken_off", "_request", "connection", "headers", "rate_headers", "request_id", "write")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_broken_off = False
        self.write = request.connection.write
        self.connection = request.connection
        self.request_id = request.name
        self.headers: Headers = request.headers
        self.rate_headers: Mapping[str, str] = {}
        """Headers of what an engine answers, which tell of the limits of its key."""

    @property
    def content_type(self) -> str:
        """The header ``Content-Type``; empty without one."""
        return self._request.headers.get("Content-Type")

    def trace_headers(self) -> Mapping[str, str]:
        """Return the headers of the client's trace; empty without a usable one."""
        headers = self._request.headers
        if _TRACE_PARENT not in headers.first_values:
            return NO_TRACE
        return trace_headers({name: headers.get(name) for name in (TRACE_PARENT, TRACE_STATE)})

    async def read_body(self, share: BodyShare, *, max_bytes: int, timeout_s: float) -> bytes:
        """Return the whole body, decompressed; raises ApiError, as ``receive_body`` does."""
        body = self._request.body
        is_small = 0 < body.declared_bytes <= min(max_bytes, MAX_UNCOUNTED_BYTES)
        if is_small and body.is_complete and (whole := body.take_whole()):
            return whole
        return await receive_body(self._request, share, max_bytes=max_bytes, timeout_s=timeout_s)

    def start_stream(self) -> None:
        """Begin a stream of events: its status 200 and headers go with its first part."""
        limits = self.rate_headers
        headers = {**_STREAM_HEADERS, **limits} if limits else _STREAM_HEADERS
        self._request.connection.start_stream(self._request, headers)

    async def finish(self, whole: WholeAnswer | None) -> None:
        """Send the whole answer, or the end of the stream unless it is broken off."""
        if whole:
            if self.rate_headers:
                whole = replace(whole, headers={**whole.headers, **self.rate_headers})
            await self._request.connection.respond(self._request, whole)
        elif not self._is_broken_off:
            await self._request.connection.end_stream()

    async def break_off(self, event: bytes) -> None:
        """Send an error event as the last one: the connection closes in the middle of the chunked stream.

        So a client cannot take a cut answer for a complete one.
        """
        self._is_broken_off = True
        try:
            await self.write(event)
        except ConnectionError:
            return
