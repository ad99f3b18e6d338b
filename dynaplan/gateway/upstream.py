"""The engine's side of a request: connections to the workers and their engines, and what their failures mean.

The request path knows engines by ``Upstream`` and ``EngineAnswer`` alone, and no type of the HTTP client.
A failure is one of two kinds. ``WorkerRefused``: the worker has certainly not begun with the request, so it
can go elsewhere as if nothing had happened. ``WorkerDied``: the worker may have begun; the request is tried
elsewhere too, but the deaths are counted, in case that it is the request that kills workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping

from dynaplan.gateway.openai_api import JSON_TYPE, ApiError, out_of_descriptors
from dynaplan.http.connections import (
    ConnectionPool,
    Origin,
    ServerConnection,
    Sink,
    Stalled,
    Target,
    target_of,
)
from dynaplan.http.stream_batching import StreamBatch
from dynaplan.http.tls import ClientTls
from dynaplan.http.trace import NO_TRACE
from dynaplan.util.descriptors import descriptor_limit, is_exhausted

REFUSALS = frozenset({502, 503, 504})
"""HTTP statuses of a worker that drains or is not ready yet."""

MAX_LINE_BYTES = 1024 * 1024
"""Bytes of one line that are held back at most; a longer line is passed on in pieces."""


class WorkerRefused(Exception):
    """The worker has not begun with the request."""


class WorkerDied(Exception):
    """The worker failed in the middle of the request, before the client got anything of its answer.

    ``is_connection_lost`` distinguishes a connection that broke off, as a dying process leaves it, from an
    answer that says that the engine has failed.
    """

    def __init__(self, reason: str, *, is_connection_lost: bool = False) -> None:
        super().__init__(reason)
        self.is_connection_lost = is_connection_lost


class Upstream:
    """Sends requests to workers with the workers' bearer token, over pooled connections.

    ``tls`` verifies workers that serve https.
    """

    def __init__(self, worker_token: str, tls: ClientTls, batch: StreamBatch) -> None:
        self._authorization = f"Authorization: Bearer {worker_token}\r\n".encode()
        self._pool = ConnectionPool(tls, batch)

    async def post(
        self,
        url: str,
        body: bytes,
        request_id: str,
        *,
        is_kept: bool = True,
        trace: Mapping[str, str] = NO_TRACE,
        content_type: str = JSON_TYPE,
        refusals: Collection[int] = REFUSALS,
        sink: Sink | None = None,
    ) -> EngineAnswer:
        """Post the request; return the answer as soon as its status is there. The caller closes it.

        Of a stream all goes to ``sink``, if there is one, as it comes; then the answer is returned when
        something is left to be read. ``trace`` are the headers of the client's trace, ``refusals`` the
        statuses that say that the worker has not begun.

        Raises WorkerRefused, or WorkerDied when the worker may have begun with the request. When a reused
        connection fails without a byte of an answer, the worker had most likely closed it as idle at that
        moment: the request is sent once more, over a new connection.
        """
        target = target_of(url)
        head = self._head(target, len(body), request_id, content_type, trace, is_kept=is_kept)
        kept = self._pool.pop_idle(target.origin) if is_kept else None
        if kept is not None:
            try:
                return await self._exchange(kept, target, head, body, refusals, sink)
            except WorkerDied:
                pass
        try:
            connection = await self._connect(target)
            return await self._exchange(connection, target, head, body, refusals, sink, is_kept=is_kept)
        except WorkerRefused as error:
            if kept is None:
                raise
            # The first attempt may have reached it before it died.
            raise WorkerDied(str(error), is_connection_lost=True) from None

    async def forward(
        self, method: str, url: str, headers: Iterable[tuple[str, str]], body: bytes, request_id: str
    ) -> EngineAnswer:
        """Send a request as it is, over a connection of its own; return the answer, whatever its status.

        Raises WorkerRefused where nothing listens, and WorkerDied.
        """
        target = target_of(url, method)
        more = "".join([f"{name}: {value}\r\n" for name, value in headers])
        own = f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{more}\r\n"
        head = target.line + self._authorization + own.encode("utf-8", "surrogateescape")
        return await self._exchange(await self._connect(target), target, head, body, (), None, is_kept=False)

    async def is_answering(self, url: str, timeout_s: float) -> bool:
        """Return whether the server at ``url`` answers ``/health`` in time, with whatever status."""
        try:
            async with asyncio.timeout(timeout_s):
                (await self.forward("GET", f"{url}/health", (), b"", "health")).close()
        except (TimeoutError, WorkerDied, WorkerRefused, ApiError):
            return False
        return True

    async def wait_for_use(self) -> None:
        """Return when a worker owes an answer. One task at a time may wait."""
        await self._pool.wait_for_use()

    def silent_origins(self) -> set[Origin]:
        """Return the workers' addresses that owe answers, and have sent nothing since the last call."""
        return self._pool.silent_origins()

    def break_off_movable(self, origin: Origin, reason: str) -> None:
        """Break off the address's streams that another worker can go on with: they raise WorkerDied."""
        self._pool.break_off_movable(origin, reason)

    async def close(self) -> None:
        """Close every connection to an engine, and break off the answers on them."""
        self._pool.close()

    def _head(
        self,
        target: Target,
        body_bytes: int,
        request_id: str,
        content_type: str,
        trace: Mapping[str, str],
        *,
        is_kept: bool,
    ) -> bytes:
        more = "" if is_kept else "Connection: close\r\n"
        if trace:
            more += "".join([f"{name}: {value}\r\n" for name, value in trace.items()])
        own = (
            f"X-Request-Id: {request_id}\r\nContent-Length: {body_bytes}\r\n"
            f"Content-Type: {content_type}\r\n{more}\r\n"
        )
        return target.line + self._authorization + own.encode("utf-8", "surrogateescape")

    async def _connect(self, target: Target) -> ServerConnection:
        try:
            return await self._pool.open(target.origin)
        except OSError as error:  # a TimeoutError, too
            if is_exhausted(error):
                raise out_of_descriptors(descriptor_limit()) from None
            raise WorkerRefused(_reason(error)) from None

    async def _exchange(
        self,
        connection: ServerConnection,
        target: Target,
        head: bytes,
        body: bytes,
        refusals: Collection[int],
        sink: Sink | None,
        *,
        is_kept: bool = True,
    ) -> EngineAnswer:
        answer = EngineAnswer(connection, self._pool, target, is_kept=is_kept)
        try:
            await connection.send(head, body)
            if sink:
                await connection.forward(sink)
            if not connection.has_head:
                await connection.wait_for_head()
            answer.status, answer.headers = connection.status, connection.headers
            if answer.status in refusals:
                raise WorkerRefused(f"status {answer.status}")
        except ConnectionError as error:
            answer.close()
            raise WorkerDied(_reason(error), is_connection_lost=True) from None
        except BaseException:
            answer.close()
            raise
        return answer


class EngineAnswer:
    """The answer to one request, from its status to ``close``, which may come at any time."""

    __slots__ = ("_held", "_is_kept", "_pool", "_target", "_whole", "connection", "headers", "status")

    def __init__(
        self, connection: ServerConnection, pool: ConnectionPool, target: Target, *, is_kept: bool = True
    ) -> None:
        self.connection = connection
        self._pool = pool
        self._target = target
        self._is_kept = is_kept
        self._held = b""
        self._whole: bytes | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []

    def header(self, name: str) -> str | None:
        """Return the value of a header; None without it."""
        wanted = name.lower().encode()
        for found, value in self.headers:
            if found == wanted:
                return value.decode("utf-8", "replace")
        return None

    async def read_all(self) -> bytes:
        """Return the whole answer, the same at each call; raises WorkerDied."""
        if self._whole is None:
            pieces = []
            while piece := await self.read_some():
                pieces.append(piece)
            self._whole = b"".join(pieces)
        return self._whole

    async def read_lines(self, sink: Sink | None = None) -> bytes:
        """Return the next whole lines, so that no event is passed on in half; empty at the answer's end.

        What ``sink`` passes on is not returned. Raises WorkerDied.
        """
        connection = self.connection
        if sink is not None and not (self._held or connection.is_complete):
            await connection.forward(sink)
        try:
            chunk = await connection.read()
        except ConnectionError as error:
            raise _death_of(error) from None
        if not self._held and (not chunk or chunk.endswith(b"\n")):
            return chunk
        return await self._complete_lines(chunk)

    async def _complete_lines(self, chunk: bytes) -> bytes:
        lines, self._held = self._held + chunk, b""
        while chunk:
            end = lines.rfind(b"\n") + 1 or (len(lines) if len(lines) > MAX_LINE_BYTES else 0)
            if end:
                self._held = lines[end:]
                return lines[:end]
            chunk = await self.read_some()
            lines += chunk
        return lines

    async def read_some(self) -> bytes:
        """Return what has come since the last call; empty only at the end. Raises WorkerDied."""
        try:
            return await self.connection.read()
        except ConnectionError as error:
            raise _death_of(error) from None

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else close it."""
        self._pool.give_back(self.connection, self._target.origin, is_kept=self._is_kept)


def _death_of(error: ConnectionError) -> WorkerDied:
    return WorkerDied(_reason(error), is_connection_lost=not isinstance(error, Stalled))


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
