"""Connections to servers, HTTP/1.1 on httptools: a request is one write, and its answer is read as it comes.

1. **Pool.** A connection whose answer was read to its end is kept for the next request to that address, the
   last one first. It goes on being read meanwhile: its end by the server, or a byte that nobody asked for,
   takes it out. One that is idle for ``KEEP_ALIVE_S`` is not used again, and soon closed.
2. **Answer.** The parser takes the framing off and leaves the body's pieces, which ``read`` joins. Interim
   answers (1xx) are skipped. An answer without a length ends with its connection. To wake a task for each
   token of a stream costs more than all that is done with it, so ``forward`` gives the pieces to a ``Sink``
   as they come, from the first one on, and wakes its task only for what that does not take. A read that is a
   whole chunk, as engines write a token, is first offered to it as it is: without the parser, and without
   another framing for the client. With other streams the reads of a turn of the loop are passed on together
   (``stream_batching``).
3. **Back-pressure.** Reading pauses while ``MAX_UNREAD_BYTES`` of an answer wait for their reader; a body of
   more than ``MAX_WRITE_BYTES`` is written piece by piece, so that other streams go on.
4. **Failure.** What has arrived is read before the error is raised: ``ConnectionError``, whatever it was.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from dynaplan.http import timing
from dynaplan.http.stream_batching import StreamBatch
from dynaplan.http.tls import ClientTls, unverified

MAX_WRITE_BYTES = 256 * 1024
"""Bytes of a body that are sent in one piece."""

MAX_UNREAD_BYTES = 256 * 1024
"""Reading pauses while more bytes of an answer are unread; one further read may exceed it."""

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of an answer's status line and headers at most."""


class Origin(NamedTuple):
    """Where a connection leads."""

    host: str
    port: int
    is_tls: bool


class KeepAlive(NamedTuple):
    """TCP keepalive: the seconds of silence before the first probe and between probes, and their number."""

    idle_s: int
    interval_s: int
    probes: int


_NEWLINE = ord("\n")
_KEEPALIVE_OPTIONS = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)


class Target(NamedTuple):
    """An address of a server; ``line`` is the request's first line and the header ``Host``."""

    origin: Origin
    line: bytes


@lru_cache(maxsize=4096)
def target_of(url: str, method: str = "POST") -> Target:
    """Return where a request to that address connects to, and its first lines; ValueError if malformed."""
    parts = urlsplit(url)
    is_tls = parts.scheme == "https"
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    line = f"{method} {path or '/'} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n".encode()
    return Target(Origin(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls), line)


class Stalled(ConnectionError):
    """A connection that was broken off here: the process at its other end stands still."""


class Sink(Protocol):
    """Passes a stream on as it arrives."""

    def is_movable(self) -> bool:
        """Tell whether another server can go on with the answer, should this one stand still."""
        ...

    def pass_on(self, lines: bytes) -> bytes:
        """Pass whole lines on; return what is left to the task that reads the answer.

        That is nothing, or all of them, after earlier ones that were held back.
        """
        ...

    def pass_chunk(self, read: bytes) -> bool:
        """Pass a read on, framing and all, if it is one whole chunk and needs no looking into.

        It is asked only where a chunk begins. False: nothing has passed; the read is
        no chunk, the empty last one, or is to be parsed.
        """
        ...


class ServerConnection(asyncio.Protocol):
    """One connection, and the answer that comes over it; ``send`` begins the next one."""

    __slots__ = (
        *("_batch", "_ends_with_connection", "_error", "_expects_answer", "_head_bytes"),
        *("_is_between_chunks", "_is_paused", "_keep_alive", "_loop", "_parser", "_pieces", "_reader"),
        *("_sink", "_transport", "_unread_bytes", "_writer", "has_head", "has_received", "headers"),
        *("idle_since_s", "is_complete", "is_movable", "is_stream", "on_body", "origin", "status"),
    )

    def __init__(self, batch: StreamBatch, origin: Origin) -> None:
        self._loop = asyncio.get_running_loop()
        self._batch = batch
        self.origin = origin
        self.has_received = False
        """Whether anything has arrived since ``ConnectionPool.silent_origins`` looked last."""
        self.is_movable: Callable[[], bool] | None = None
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._unread_bytes = 0
        self.on_body = self._pieces.append  # the parser's event: no function of ours for each piece
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._is_paused = False
        self._sink: Sink | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._error: ConnectionError | None = None
        self._expects_answer = False
        self._ends_with_connection = False
        self._is_between_chunks = False
        """Whether the next byte begins a chunk, and nothing before it waits to be read.

        The last chunk has ended, and no part of a size has come.
        """
        self._keep_alive = False
        self.is_complete = True
        """Whether all of the answer has arrived."""
        self.idle_since_s = 0.0
        self.has_head = False
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_stream = False
        """Whether the answer may be one of events: it has status 200, and is no JSON document."""

    # -- one exchange, called by the request -------------------------------------------------------

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_reusable(self) -> bool:
        """True when the answer was whole, and both sides keep the connection."""
        transport = self._transport
        is_kept = self.is_complete and self._keep_alive and self._error is None
        return is_kept and transport is not None and not transport.is_closing()

    async def send(self, head: bytes, body: bytes) -> None:
        """Send a request; raises ConnectionError. ``forward`` or ``wait_for_head`` comes next."""
        self._expects_answer, self.is_complete, self.has_head = True, False, False
        self._head_bytes = 0
        if self._transport is None:
            raise self._error or ConnectionError("the connection was closed")
        if len(body) <= MAX_WRITE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            await self._send_pieces(body)

    async def wait_for_head(self) -> None:
        """Wait for the answer's status and headers; raises ConnectionError."""
        while not self.has_head:
            if self._error:
                raise self._error
            self._reader = self._loop.create_future()
            await self._reader

    async def read(self) -> bytes:
        """Wait for the next bytes of the body, and return them; b"" at its end; raises ConnectionError."""
        while not self._pieces:
            if self.is_complete:
                return b""
            if self._error:
                raise self._error
            self._reader = self._loop.create_future()
            await self._reader
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._unread_bytes = 0
        if self._is_paused:
            self._read_on()
        return data

    async def forward(self, sink: Sink) -> None:
        """Pass the whole lines of a stream on as they arrive, until something waits for ``read``.

        That is what the sink leaves, what ends within a line, what came with the answer's end, so that its
        reader can send both at once, and all of an answer that is no stream.
        """
        self._sink, self.is_movable = sink, sink.is_movable
        self._batch.begin_stream()
        try:
            while not (self._pieces or self.is_complete or self._error):
                self._reader = self._loop.create_future()
                await self._reader
        finally:
            self._batch.end_stream()
            self._sink = None

    def drop_unread(self) -> None:
        """Forget what waits for a reader, and read on."""
        self._pieces.clear()
        self._unread_bytes = 0
        if self._is_paused:
            self._read_on()

    def _read_on(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close the connection at once, which TLS would do only when the server has agreed."""
        if self._transport is not None:
            self._transport.abort()

    def have_kernel_probe(self, wanted: KeepAlive) -> None:
        """Have the kernel find out that the other machine is gone, while nothing is sent over it."""
        peer: socket.socket | None = self._transport.get_extra_info("socket") if self._transport else None
        if peer is None or peer.family == socket.AF_UNIX:
            return
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in zip(_KEEPALIVE_OPTIONS, wanted, strict=True):
            peer.setsockopt(socket.IPPROTO_TCP, option, value)

    def break_off(self, reason: str) -> None:
        """End the connection as if the server had, for this reason."""
        self._fail(reason, Stalled)
        if self._transport is not None:
            self._transport.abort()

    async def _send_pieces(self, body: bytes) -> None:
        """Send a large body, for as long as the server takes it; it may answer before it has all.

        One that stops taking it for a long answer waits until that is read, which is after this.
        """
        for at in range(0, len(body), MAX_WRITE_BYTES):
            if self._error or self.is_complete or self._is_paused or self._transport is None:
                break
            self._transport.write(body[at : at + MAX_WRITE_BYTES])
            if self._writer is not None:
                await self._writer
            await asyncio.sleep(0)
        else:
            return
        self._keep_alive = False

    # -- events of the transport -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Pass what has arrived on, or wake its reader.

        Beside other streams that is done at the end of the loop's turn, when the batch calls this again.
        """
        self.has_received = True
        batch, sink = self._batch, self._sink
        if sink is not None:
            if batch.gathers:
                if arrived := batch.arrived:  # what ``add`` does, and a call less for nearly every token
                    arrived.append((self, data))
                else:
                    batch.add(self, data)
                return
            try:
                if self._is_between_chunks and self._reader is not None and sink.pass_chunk(data):
                    return  # the parser stays between two chunks
            except Exception as error:
                self._raise_in_task(error)
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(error)
        self._is_between_chunks = self._is_between_chunks and data[-2:] == b"\r\n"
        if not self.has_head:
            self._limit_head(len(data))
        reader, sink, pieces = self._reader, self._sink, self._pieces
        if reader is None or reader.done():  # done: its task is cancelled
            self._is_between_chunks = False
            self._count_unread(len(data))
            return
        if sink is not None and not (self.is_complete or self._error):
            if not pieces:
                return
            lines = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if lines[-1] == _NEWLINE:
                try:
                    left = sink.pass_on(lines)
                except Exception as error:
                    self._raise_in_task(error)
                    return
                pieces.clear()
                if not left:
                    return
                pieces.append(left)
        self._reader = None
        reader.set_result(None)
        self._count_unread(len(data))

    def _raise_in_task(self, error: Exception) -> None:
        """Raise an error of the sink in the task that waits, if one does: it is of that task's own work."""
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_exception(error)

    def _refuse(self, error: Exception) -> None:
        """End the connection over what is no HTTP; an answer that is whole already stays."""
        if not self.is_complete or not self.has_head:
            self._fail(f"its answer is no HTTP: {error}")
        self.close()

    def _limit_head(self, size_bytes: int) -> None:
        """Count these bytes to the answer's head, and end the connection where it is too long."""
        self._head_bytes += size_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            self._fail("the headers of its answer never end")
            self.close()

    def _count_unread(self, size_bytes: int) -> None:
        """Note that so much waits for a reader, its framing counted too; pause reading beyond the limit."""
        self._unread_bytes += size_bytes
        if self._unread_bytes > MAX_UNREAD_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
            self.resume_writing()

    def eof_received(self) -> None:
        """End an answer that ends with its connection; the transport closes itself."""
        self._batch.run()
        if self.has_head and self._ends_with_connection:
            self.is_complete = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._batch.run()
        self._transport = None
        del self._parser  # it leads back here: work for the garbage collector
        if not self.is_complete or not self._expects_answer:
            self._fail(str(exc or "the connection was closed"))
        self._keep_alive = False
        self._wake()

    def pause_writing(self) -> None:
        self._writer = self._loop.create_future()

    def resume_writing(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None and not writer.done():
            writer.set_result(None)

    def _fail(self, reason: str, kind: type[ConnectionError] = ConnectionError) -> None:
        if self._error is None:
            self._error = kind(reason)
        self.resume_writing()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)
        self.resume_writing()

    # -- events of the parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._expects_answer:
            self.headers = []
        else:
            raise ConnectionError("it sent more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.has_head:  # what follows the body are trailers
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or not self._expects_answer:
            return
        self.status, self.has_head = status, True
        self._keep_alive = self._parser.should_keep_alive()
        by_name = dict(self.headers)
        self._ends_with_connection = not (b"content-length" in by_name or b"transfer-encoding" in by_name)
        self.is_stream = status == 200 and not by_name.get(b"content-type", b"").startswith(
            b"application/json"
        )
        if not self.is_stream:
            self._sink = None

    def on_chunk_header(self) -> None:
        self._is_between_chunks = False

    def on_chunk_complete(self) -> None:
        self._is_between_chunks = True

    def on_message_complete(self) -> None:
        self._is_between_chunks = False
        if self.has_head:
            self.is_complete, self._expects_answer = True, False
            if self._writer is not None:
                self.resume_writing()


class ConnectionPool:
    """Opens connections, and keeps those that wait for a next request."""

    def __init__(
        self,
        tls: ClientTls,
        batch: StreamBatch,
        *,
        unix_socket: str = "",
        connect_timeout_s: float = timing.CONNECT_TIMEOUT_S,
    ) -> None:
        self._tls = tls
        self._batch = batch
        self._unix_socket = unix_socket
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Origin, list[ServerConnection]] = {}
        self._used: set[ServerConnection] = set()
        self._first_use: asyncio.Future[None] | None = None
        self._lively: set[Origin] | None = None
        """Addresses whose connections had received something when they were given back, since the last
        ``silent_origins``; None before the first: where nobody asks, nothing is kept."""
        self._reaping: asyncio.TimerHandle | None = None
        self._is_closed = False

    def pop_idle(self, origin: Origin) -> ServerConnection | None:
        """Return a kept connection to that address; None when there is none."""
        idle = self._idle.get(origin)
        oldest_s = self._loop.time() - timing.KEEP_ALIVE_S
        while idle:
            connection = idle.pop()
            if connection.is_reusable and connection.idle_since_s > oldest_s:
                self._used.add(connection)
                if self._first_use:
                    self._report_first_use()
                return connection
            connection.close()
        return None

    async def open(self, origin: Origin) -> ServerConnection:
        """Return a new connection; raises OSError or TimeoutError."""
        async with asyncio.timeout(self._connect_timeout_s):
            if self._unix_socket:
                _, connection = await self._loop.create_unix_connection(
                    lambda: ServerConnection(self._batch, origin), self._unix_socket
                )
            else:
                _, connection = await self._loop.create_connection(
                    lambda: ServerConnection(self._batch, origin),
                    origin.host,
                    origin.port,
                    ssl=self._context(origin),
                )
        if self._is_closed:  # meanwhile
            connection.close()
            raise ConnectionError("this process is closing")
        self._used.add(connection)
        if self._first_use:
            self._report_first_use()
        return connection

    async def wait_for_use(self) -> None:
        """Return when a connection is in use. One task at a time may wait."""
        if not self._used:
            self._first_use = self._loop.create_future()
            await self._first_use

    def _report_first_use(self) -> None:
        first_use, self._first_use = self._first_use, None
        if first_use and not first_use.done():
            first_use.set_result(None)

    def give_back(self, connection: ServerConnection, origin: Origin, *, is_kept: bool) -> None:
        """Keep a connection whose answer was whole, if it ``is_kept``; close any other. Twice is once."""
        if connection not in self._used:
            return
        self._used.remove(connection)
        connection.is_movable = None
        if connection.has_received:
            connection.has_received = False
            if self._lively is not None:
                self._lively.add(origin)
        if not (is_kept and connection.is_reusable):
            connection.close()
            return
        connection.drop_unread()
        connection.idle_since_s = self._loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._reaping is None:
            self._reaping = self._loop.call_later(timing.KEEP_ALIVE_S, self._reap)

    def silent_origins(self) -> set[Origin]:
        """Return the addresses with connections in use from which nothing came since the last call."""
        used, lively = set(), self._lively or set()
        self._lively = set()
        for connection in self._used:
            used.add(connection.origin)
            if connection.has_received:
                connection.has_received = False
                lively.add(connection.origin)
        return used - lively

    def break_off_movable(self, origin: Origin, reason: str) -> None:
        """Break off the answers from that address that another worker can go on with (``is_movable``)."""
        for connection in [each for each in self._used if each.origin == origin]:
            if connection.is_movable is not None and connection.is_movable():
                connection.break_off(reason)

    def close(self) -> None:
        """Close every connection, and refuse new ones."""
        self._is_closed = True
        if self._reaping:
            self._reaping.cancel()
            self._reaping = None
        for connection in (*self._used, *(each for idle in self._idle.values() for each in idle)):
            connection.abort()
        self._idle.clear()
        self._used.clear()

    def _reap(self) -> None:
        """Close what has been idle for too long, or is broken."""
        oldest_s = self._loop.time() - timing.KEEP_ALIVE_S
        for origin, idle in list(self._idle.items()):
            kept = [each for each in idle if each.is_reusable and each.idle_since_s > oldest_s]
            for connection in set(idle) - set(kept):
                connection.close()
            self._idle[origin] = kept
            if not kept:
                del self._idle[origin]
        self._reaping = self._loop.call_later(timing.KEEP_ALIVE_S, self._reap) if self._idle else None

    def _context(self, origin: Origin) -> ssl.SSLContext | None:
        if not origin.is_tls:
            return None
        if isinstance(self._tls, ssl.SSLContext):
            return self._tls
        return _system_authorities() if self._tls else unverified()


@cache
def _system_authorities() -> ssl.SSLContext:
    return ssl.create_default_context()
