"""HTTP/1.1 towards clients, on httptools: one protocol for each connection, in front of a handler.

1. **Requests.** When a head is complete its task starts; the body follows through ``RequestBody``. Pipelined
   requests are queued; the socket is not read while ``MAX_PIPELINED`` of them are.
2. **Answers.** A whole one is one write. A stream has a chunk for each ``write``, and its head goes with the
   first; to HTTP/1.0 its end is the connection's. What is not ended is cut: the connection closes in the
   middle of the chunked encoding.
3. **After an answer** the connection is kept, unless one side does not want to. What the client still sends
   of a body that nobody reads is discarded, for ``LINGER_S`` at most: closing at once would reset the
   connection, and the client might not see its answer.
4. **A client that leaves** cancels the task of its request, unless the socket is not read.
5. **Malformed.** What the parser does not understand, or framing that two servers might read in two ways, is
   answered 400 and ends the connection. Only the parser's reason is logged, never a byte of the client's.

Slow clients, and too many, are the matter of ``limits.LimitedConnections``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from dynaplan.http import timing
from dynaplan.http.accept_shares import AcceptShares
from dynaplan.http.acceptor import Acceptor
from dynaplan.http.browser_policy import BROWSER_HEADERS, readable_headers
from dynaplan.http.limits import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_LINE_BYTES,
    ConnectionLimits,
    LimitedConnections,
    raw_error,
    unread_bytes,
)
from dynaplan.http.messages import ENCODINGS, Headers, Request, RequestBody, Response, path_of
from dynaplan.http.request_ids import new_request_id, request_id
from dynaplan.http.stream_batching import StreamBatch
from dynaplan.http.tls import ServerTls
from dynaplan.http.trace import REQUEST_ID
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger("dynaplan.http")

Handler = Callable[[Request], Awaitable[Response | None]]
"""Answers a request: by what it returns, or by itself through the request's connection; then by None.

What is returned when a part of a stream has been sent is not: the connection is closed.
"""

MAX_PIPELINED = 4
"""Reading pauses while this many requests wait for the answer of the one before; one read may exceed it."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class KeptConnection(Protocol):
    """Reports on a connection to another process, which goes on with it if this one is killed."""

    def received(self, data: bytes, *, is_answer_sent: bool) -> None:
        """Report bytes that the client has sent, and whether the kernel has all of the previous answer."""

    def begin_answer(self, last_words: bytes = b"") -> None:
        """Report that an answer is being sent; ``last_words`` are to end it if this process cannot."""

    def end_answer(self, *, is_more_coming: bool) -> None:
        """Report that the answer was written, and whether a rest or another request is coming."""

    def settle(self) -> None:
        """Report that the kernel has the whole answer."""

    def release(self) -> None:
        """Report that the connection is closed."""


Keep = Callable[[int], KeptConnection | None]
"""Has a connection kept, by its descriptor; None where it is not."""


ReadableBy = Callable[[str, Headers], str]
"""Returns, of a request's path and headers, the web origin whose scripts may read the answer, or "" ."""


def _nobody(path: str, headers: Headers) -> str:
    return ""


def _server_error(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return Response.json({"error": "the server failed"}, 500)


class HttpServer:
    """Answers the requests of its connections by ``handle``, and by ``failed`` where that raises an error.

    ``closed`` is called with the reason for each connection that is closed over a limit. ``batch`` gathers
    the writes of streams. While it ``is_draining``, every answer says "Connection: close". ``keep`` makes the
    KeptConnection of a new connection; ``last_words`` returns what then ends a cut stream, by its path.
    """

    def __init__(
        self,
        handle: Handler,
        limits: ConnectionLimits,
        *,
        closed: Callable[[str], None] = lambda reason: None,
        batch: StreamBatch | None = None,
        readable_by: ReadableBy = _nobody,
        failed: Callable[[Request, Exception], Response] = _server_error,
        last_words: Callable[[str], bytes] = lambda path: b"",
    ) -> None:
        self.handle = handle
        self.readable_by = readable_by
        self.failed = failed
        self.batch = batch or StreamBatch()
        self.limited = LimitedConnections(limits, self._make_connection, closed)
        self.is_draining = False
        self._acceptor: Acceptor | None = None
        self._watching = BackgroundTasks()
        self.keep: Keep | None = None
        self.last_words = last_words

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that the server listens on."""
        assert self._acceptor
        return self._acceptor.address

    def listen(
        self,
        listen_on: socket.socket,
        *,
        shares: AcceptShares | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """Take the connections of this socket, and hold them to the limits; see ``Acceptor``.

        ``shares`` divides the connections among the processes on the socket; None: there is one.
        """
        limited = self.limited
        self._acceptor = Acceptor(
            listen_on, limited.welcome, has_room=limited.has_room, shares=shares, tls=tls
        )
        self._acceptor.start()
        self._watching.spawn(limited.watch(), "watch connections")

    def _make_connection(self, accepted: socket.socket) -> ClientConnection:
        """Make the protocol of an accepted connection.

        It is kept first of all: until then a kill of this process resets it, and the loop's next turn may
        take long.
        """
        return ClientConnection(self, self.keep(accepted.fileno()) if self.keep else None)

    async def stop_listening(self) -> None:
        """Take no more connections; open ones continue. Twice is once."""
        if self._acceptor:
            await self._acceptor.stop()

    async def sent(self) -> None:
        """Return when the clients of closing TLS connections have all that was written; see ``Acceptor``."""
        if self._acceptor:
            await self._acceptor.closed()

    async def close(self, timeout_s: float = timing.CLOSE_TIMEOUT_S) -> None:
        """Stop listening, close every connection, and cancel the requests on them.

        What is open after the timeout is aborted.
        """
        await self.stop_listening()
        await self._watching.cancel()
        until_s = asyncio.get_running_loop().time() + timeout_s
        connections = [each for each in self.limited.open if isinstance(each, ClientConnection)]
        tasks = [task for each in connections if (task := each.close())]
        self.limited.close_refused()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        while self.limited.open and asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(timing.CLOSE_POLL_S)
        for each in connections:  # of clients that read nothing
            if each.transport is not None:
                each.transport.abort()


class _Malformed(Exception):
    """A head that goes beyond a limit."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.answer = status, message, code


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        *("_batch", "_body", "_drained", "_head_bytes", "_headers", "_headers_bytes", "_held"),
        *("_ignores_input", "_is_chunked", "_is_ended", "_is_in_head", "_is_kept", "_is_started"),
        *("_is_upgrade", "_kept", "_last_words", "_loop", "_parser", "_pending_error", "_requests_begun"),
        *("_server", "_target", "_task", "_unsent_head", "_waiting", "_written_bytes", "idle_since_s"),
        *("last_progress", "stalled_since_s", "transport"),
    )

    def __init__(self, server: HttpServer, kept: KeptConnection | None = None) -> None:
        self._server = server
        self._batch = server.batch
        self._kept = kept
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self.transport: asyncio.Transport | None = None
        self.stalled_since_s = 0.0
        self.last_progress: tuple[object, ...] = ()
        self.idle_since_s = self._loop.time()
        # the request whose head or body is coming
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._headers_bytes = 0
        self._head_bytes = 0
        self._is_in_head = False
        self._is_upgrade = False
        self._body: RequestBody | None = None
        # the requests that have come
        self._waiting: deque[Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._requests_begun = 0
        self._pending_error = b""
        self._ignores_input = False
        # the answer that is being written
        self._is_chunked = False
        self._is_started = False
        self._is_ended = False
        self._is_kept = True
        self._unsent_head = b""
        self._held = b""
        self._written_bytes = 0
        self._drained: asyncio.Future[None] | None = None
        self._last_words = b""

    # -- limits --------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        is_reading = self._is_in_head or self._ignores_input or self._body is not None
        return self._task is None and not is_reading and self.transport is not None

    @property
    def has_asked(self) -> bool:
        return self._requests_begun > 0

    def progress(self) -> tuple[object, ...]:
        if self.transport is None:
            return ()
        if self.transport.get_write_buffer_size():
            return "write_timeout", self._written_bytes - unread_bytes(self.transport)
        return ("head_timeout", self._requests_begun) if self._is_in_head else ()

    def close_with(self, status: int, message: str, code: str) -> None:
        if self.transport is not None and self._task is None:
            self.transport.write(_raw_error(status, message, code))
        self.close()

    def close_idle(self) -> None:
        self.close()

    def close(self) -> asyncio.Task[None] | None:
        """Close the connection; return the task that this cancels."""
        if self.transport is not None:
            self.transport.close()
        if self._task is not None:
            self._task.cancel()
        return self._task

    # -- events of the transport ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._server.limited.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self._kept is not None:
            self._kept.release()
            self._kept = None
        del self._parser  # it leads back here: work for the garbage collector
        self._server.limited.lost(self)
        self._waiting.clear()
        if self._body is not None:
            self._body.fail("the client has left")
        if self._task is not None:  # case 4
            self._task.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._kept is not None:
            is_answer_sent = self.transport is not None and not self.transport.get_write_buffer_size()
            self._kept.received(data, is_answer_sent=is_answer_sent)
        self._head_bytes += len(data)
        rest = memoryview(data)
        while rest and not self._ignores_input:
            rest = self._parse(rest)
        if self._head_bytes > MAX_HEAD_BYTES and not self._ignores_input:
            self._refuse(*_too_large_head().answer)

    def _parse(self, data: bytes | memoryview) -> memoryview:
        """Parse this; return what follows a request that asks for another protocol."""
        rest = memoryview(b"")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            rest = memoryview(data)[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse_malformed(error)
            return rest
        else:
            return rest
        if self._is_upgrade:
            self._parse_without_upgrade()
        else:  # CONNECT
            self._ignores_input = True
            self._is_kept = self._is_kept and bool(self._waiting)
        return rest

    def _parse_without_upgrade(self) -> None:
        """Parse a request that asks for another protocol, HTTP/2 perhaps, as one that does not (RFC 9110).

        The parser takes what follows its head for the other protocol's.
        """
        version = self._parser.get_http_version().encode()
        line = b"%b %b HTTP/%b\r\n" % (self._parser.get_method(), self._target, version)
        kept = [b"%b: %b\r\n" % pair for pair in _without_upgrade(self._headers)]
        self._is_upgrade = False
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"%b%b\r\n" % (line, b"".join(kept)))

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # -- events of the parser ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._is_in_head = True
        self._target, self._headers, self._headers_bytes = b"", [], 0
        self._body = None

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > MAX_LINE_BYTES:
            raise _Malformed(414, f"The address is longer than {MAX_LINE_BYTES} bytes", "uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:
            self._headers.append((name.lower(), value))
            self._headers_bytes += len(name) + len(value)
        elif name.lower() in _FRAMING:  # behind the body, where only trailers are
            raise _Malformed(400, "A trailer is about the body's framing", "bad_http")

    def on_headers_complete(self) -> None:
        assert self.transport is not None
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            self._is_upgrade = True
            return
        self._is_in_head = False
        self._head_bytes = 0
        self._requests_begun += 1
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            raise _Malformed(505, "This server speaks HTTP/1.1", "http_version")
        if self._headers_bytes > MAX_LINE_BYTES or len(self._headers) > MAX_HEADERS:
            _check_size(self._headers)
        headers, target = Headers(self._headers), self._target.decode("ascii", "surrogateescape")
        length, encoding = _read_framing(self._headers, headers.first_values, version)
        self._body = RequestBody(length, encoding, self.transport)
        path = path_of(target)
        is_from_browser = not BROWSER_HEADERS.isdisjoint(headers.first_values)
        own_name = headers.first_values.get(_REQUEST_ID)
        request = Request(
            self._parser.get_method().decode(),
            target,
            path,
            headers,
            self._body,
            self,
            request_id(own_name.decode("latin-1")) if own_name else new_request_id(),
            is_http_10=version == "1.0",
            is_kept=self._parser.should_keep_alive(),
            readable_by=self._server.readable_by(path, headers) if is_from_browser else "",
            is_from_browser=is_from_browser,
        )
        if self._task is None:
            self._start(request)
        else:
            self._waiting.append(request)
            if len(self._waiting) >= MAX_PIPELINED:
                self.transport.pause_reading()

    def on_body(self, data: bytes) -> None:
        self._head_bytes = 0
        if self._body is not None:
            self._body.add(data)

    def on_message_complete(self) -> None:
        if self._is_upgrade:
            return
        self._head_bytes = 0
        body, self._body = self._body, None
        if body is not None:
            body.complete()
        if self._task is None and self._is_ended:  # its answer did not wait for it
            self._after_answer()

    # -- requests ------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        self._is_started = self._is_ended = self._is_chunked = False
        self._unsent_head = self._held = b""
        is_last = self._ignores_input and not (self._waiting or self._pending_error)
        self._is_kept = request.is_kept and not is_last
        self._task = self._loop.create_task(self._answer(request))

    async def _answer(self, request: Request) -> None:
        try:
            try:
                response = await self._server.handle(request)
            except ConnectionError:
                raise
            except Exception as error:
                response = self._server.failed(request, error)
            if response is not None and (not self._is_started or self._unsent_head):
                await self.respond(request, response)
        except ConnectionError:
            pass
        finally:
            self._task = None
            self._end_answer(request)

    def _end_answer(self, request: Request) -> None:
        """Go on with the connection after an answer, whole or cut."""
        self.idle_since_s = self._loop.time()
        if self.transport is None:
            return
        if self._kept is not None:
            is_more_coming = bool(self._waiting) or self._is_in_head or not request.body.is_complete
            self._kept.end_answer(is_more_coming=is_more_coming)
            self._loop.call_soon(self._settle)  # before 0.23 uvloop writes at the end of its turn
        if not self._is_ended:  # cut, or cancelled
            if self._held and not self.transport.is_closing():
                self.transport.write(self._held)
            if request.is_http_10 and self._is_started:
                self.transport.abort()  # closed it would look whole
            else:
                self.transport.close()
        elif request.body.is_complete:
            self._after_answer()
        else:
            request.body.discard()
            self._loop.call_later(timing.LINGER_S, self._stop_lingering, self._requests_begun)

    def _settle(self) -> None:
        """Have the connection kept again, once the kernel has the whole of its last answer."""
        if self.transport is None or self._kept is None or self.transport.is_closing():
            return
        if self.is_idle and not self.transport.get_write_buffer_size():
            self._kept.settle()

    def _stop_lingering(self, requests: int) -> None:
        """Close a connection whose client still sends the body of that request, or broke it off."""
        is_coming = self._body is not None or self._ignores_input
        if self._requests_begun == requests and is_coming and self._task is None:
            self.close()

    def _after_answer(self) -> None:
        """Answer the next request that has arrived, or wait for one, or close the connection."""
        assert self.transport is not None
        if self._waiting and self._is_kept:
            self._start(self._waiting.popleft())
            is_paused = self._body is not None and self._body.is_paused
            if len(self._waiting) < MAX_PIPELINED and not (is_paused or self.transport.is_closing()):
                self.transport.resume_reading()
        elif self._pending_error or not self._is_kept or self._ignores_input:
            if self._pending_error and self._is_kept:
                self._send_pending_error()
            else:
                self.transport.close()

    def _send_pending_error(self) -> None:
        """Send the pending error as the last answer; close with the client, or after LINGER_S (case 3)."""
        assert self.transport is not None
        if self.transport.is_closing():
            return
        self.transport.write(self._pending_error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(timing.LINGER_S, self.close)

    def _refuse_malformed(self, error: Exception) -> None:
        """Answer bytes that are no HTTP request with an error, which is sent by ``_refuse``."""
        cause = error.__context__
        if isinstance(cause, _Malformed):
            self._refuse(*cause.answer)
        else:
            reason = str(error)
            log.info("a client's bytes are no HTTP request: %s", reason)
            self._refuse(400, f"This is no HTTP request: {reason}", "bad_http")

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Send this error once the running request is answered, and stop reading.

        A body that is being received fails instead, and its reader answers. Headers that go beyond every
        limit end the connection, and the running request, at once.
        """
        self._ignores_input = True
        if status == 431:
            self._server.limited.closed("head_too_large")
        if self._body is not None:
            self._body.fail(message)
            self._body = None
            if self._task is None:  # it is answered already
                self.close()
            elif not self._waiting:
                self._is_kept = False
            return
        self._pending_error = _raw_error(status, message, code)
        if self._task is None and self.transport is not None:
            self._send_pending_error()
        elif code == "head_too_large":
            self.close()

    # -- answers: messages.Answering -------------------------------------------------------------

    async def respond(self, request: Request, response: Response) -> None:
        body = response.body
        if response.headers.get("Connection") == "close" or self._server.is_draining:
            self._is_kept = False
        framing = "" if response.status == 204 else f"Content-Length: {len(body)}\r\n"  # RFC 9110, 8.6
        head = self._head(request, response.status, response.headers, framing)
        self._is_started, self._is_chunked, self._unsent_head = True, False, b""
        if self._kept is not None:
            self._kept.begin_answer()
        await self._send(head if request.method == "HEAD" else head + body)
        self._is_ended = True

    def start_stream(self, request: Request, headers: Mapping[str, str], status: int = 200) -> None:
        self._is_kept = self._is_kept and not (request.is_http_10 or self._server.is_draining)
        self._is_chunked = not request.is_http_10
        framing = "Transfer-Encoding: chunked\r\n" if self._is_chunked else ""
        self._is_started = True
        self._unsent_head = self._head(request, status, headers, framing)
        if self._kept is not None and self._is_chunked:
            self._last_words = self._server.last_words(request.path)

    async def write(self, data: bytes) -> None:
        if not data:  # an empty chunk is the last one
            return
        data = b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data
        await self._send(self._with_head(data) if self._unsent_head else data)

    def write_now(self, data: bytes) -> bool:
        if self._held or not self._takes_chunks():
            return False
        if not data:  # an empty chunk is the last one
            return True
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        return self.write_chunk_now(self._with_head(chunk) if self._unsent_head else chunk)

    def hold(self, data: bytes) -> bool:
        if not self._takes_chunks():
            return False
        chunk = b"%x\r\n%b\r\n" % (len(data), data)
        self._held += self._with_head(chunk) if self._unsent_head else chunk
        return True

    def _takes_chunks(self) -> bool:
        transport, is_free = self.transport, self._drained is None and self._is_chunked
        return is_free and transport is not None and not transport.is_closing()

    def write_chunk_now(self, chunk: bytes) -> bool:
        transport = self.transport  # as ``_takes_chunks``, without a call for every token
        if transport is None or self._drained is not None or not self._is_chunked or transport.is_closing():
            return False
        if (writes := self._batch.writes) is None:
            transport.write(chunk)
        else:
            writes.append((transport, chunk))
        self._written_bytes += len(chunk)
        return True

    def _with_head(self, data: bytes) -> bytes:
        """Put the answer's head before its first part, which is to be sent now."""
        head, self._unsent_head = self._unsent_head, b""
        if self._kept is not None:
            self._kept.begin_answer(self._last_words)
        return head + data

    async def end_stream(self) -> None:
        head, self._unsent_head = self._unsent_head, b""
        await self._send(head + _LAST_CHUNK if self._is_chunked else head)
        self._is_ended = True

    async def ask_for_body(self) -> None:
        await self._send(_CONTINUE)

    async def flush(self) -> None:
        transport = self.transport
        if transport is None or not transport.get_write_buffer_size():
            return
        transport.set_write_buffer_limits(high=0)
        if self._drained is not None:
            await asyncio.shield(self._drained)
        if self.transport is not None:
            transport.set_write_buffer_limits()

    async def _send(self, data: bytes) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has left")
        if self._held:
            data, self._held = self._held + data, b""
        transport.write(data)
        self._written_bytes += len(data)
        if self._drained is not None:
            await asyncio.shield(self._drained)

    def _head(self, request: Request, status: int, headers: Mapping[str, str], framing: str) -> bytes:
        if request.readable_by:
            headers = {**headers, **readable_headers(request.readable_by)}
        given = _header_lines(tuple(headers.items()))
        kept = "" if self._is_kept else "Connection: close\r\n"
        if self._is_kept and request.is_http_10:
            kept = "Connection: keep-alive\r\n"
        version = "1.0" if request.is_http_10 else "1.1"
        head = f"HTTP/{version} {_status_line(status)}{_date(int(time.time()))}{framing}{kept}{given}"
        return f"{head}{REQUEST_ID}: {request.name}\r\n\r\n".encode("utf-8", "surrogateescape")


_REQUEST_ID = REQUEST_ID.lower().encode()
_FRAMING = (b"content-length", b"transfer-encoding", b"content-encoding")
_ENCODED = frozenset((b"transfer-encoding", b"content-encoding"))
_STATUSES = frozenset(HTTPStatus)


def _too_large_head() -> _Malformed:
    return _Malformed(431, f"The headers are larger than {MAX_HEAD_BYTES} bytes", "head_too_large")


def _check_size(headers: list[tuple[bytes, bytes]]) -> None:
    """Raise _Malformed for too many headers, or too large ones."""
    sizes = [len(name) + len(value) for name, value in headers]
    if len(sizes) > MAX_HEADERS:
        raise _Malformed(400, f"There are more than {MAX_HEADERS} headers", "too_many_headers")
    if max(sizes, default=0) > MAX_LINE_BYTES:
        raise _Malformed(431, f"A header is larger than {MAX_LINE_BYTES} bytes", "header_too_large")
    if sum(sizes) > MAX_HEAD_BYTES:
        raise _too_large_head()


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of the request without those by which it asks for another protocol."""
    named = (b"upgrade", b"http2-settings")
    for name, value in headers:
        if name == b"connection":
            value = b",".join(each for each in value.split(b",") if each.strip().lower() not in named)
        if name not in named:
            yield name, value


def _read_framing(
    headers: list[tuple[bytes, bytes]], first: Mapping[bytes, bytes], version: str
) -> tuple[int, str]:
    """Return the declared length of the body in bytes, and its compression; raises _Malformed.

    ``first`` has the first header of each name. The parser has refused lengths that contradict each other, or
    a transfer encoding.
    """
    if len(first) == len(headers) and b"host" in first and _ENCODED.isdisjoint(first):
        return int(first.get(b"content-length", 0)), ""
    length, hosts, encodings = 0, 0, []
    for name, value in headers:
        hosts += name == b"host"
        if name == b"content-length":
            length = int(value)
        elif name == b"content-encoding":
            encodings += value.decode("latin-1").lower().replace(" ", "").split(",")
        elif name == b"transfer-encoding" and (value.strip().lower() != b"chunked" or version == "1.0"):
            raise _Malformed(400, "The only transfer encoding here is 'chunked', of HTTP/1.1", "bad_http")
    if hosts > 1 or (not hosts and version == "1.1"):  # RFC 9112, 3.2
        raise _Malformed(400, "A request has one header 'Host'", "bad_http")
    encodings = [each for each in encodings if each not in ("", "identity")]
    if len(encodings) > 1 or set(encodings) - set(ENCODINGS):
        raise _Malformed(
            415,
            f"The body is compressed by a way that is not understood here. Send it as it is, or by one of "
            f"{', '.join(ENCODINGS)}.",
            "unknown_encoding",
        )
    return length, "".join(encodings)


@lru_cache(maxsize=64)
def _header_lines(headers: tuple[tuple[str, str], ...]) -> str:
    """Return the lines of an answer's headers, but for "Connection", which is the server's own."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers if name != "Connection"])


@lru_cache(maxsize=64)
def _status_line(status: int) -> str:
    """Return the status and its phrase, which is empty for a status of none of the RFCs, as 529 is."""
    phrase = HTTPStatus(status).phrase if status in _STATUSES else ""
    return f"{status} {phrase}\r\n"


@lru_cache(maxsize=1)
def _date(unix_s: int) -> str:
    return f"Date: {formatdate(unix_s, usegmt=True)}\r\n"


def _raw_error(status: int, message: str, code: str) -> bytes:
    return raw_error(status, message, code, f"{REQUEST_ID}: {new_request_id()}\r\n")
