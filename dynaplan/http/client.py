"""Requests to other processes, over kept connections (``connections``): one client for all that ask.

A failure is an ``OSError``, whatever it was: ``NotConnected`` while nothing of the request has left, also for
a malformed address; ``TimeoutError``; else ``ConnectionError``, also for an answer that is no HTTP. Redirects
are not followed, and nothing is asked for that would have to be decompressed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from dynaplan.http import timing
from dynaplan.http.connections import ConnectionPool, ServerConnection, Target, target_of
from dynaplan.http.messages import Headers
from dynaplan.http.stream_batching import StreamBatch
from dynaplan.http.tls import ClientTls, describe_error

NO_HEADERS: Mapping[str, str] = {}
JSON_BODY = {"Content-Type": "application/json"}

MAX_TRIED_BYTES = 4 * 1024 * 1024
"""Bytes of a body after which ``try_get`` reads no more."""


class NotConnected(ConnectionError):
    """No connection came about, so the server knows nothing of the request; ``__cause__`` says more."""


@dataclass(frozen=True)
class WholeAnswer:
    """An answer that was read to its end."""

    status: int
    headers: Headers
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")

    def json(self) -> Any:
        """Return the document in the body; raises ValueError."""
        return json.loads(self.body)

    def checked(self) -> WholeAnswer:
        """Return this answer; raises ConnectionError unless its status is 200."""
        if self.status != 200:
            raise ConnectionError(f"status {self.status}")
        return self


class Answer:
    """An answer whose status is there, and whose body is read as it comes. The caller has to close it.

    ``read_some`` returns b"" at the end of the body. Closing the answer before that closes its connection.
    """

    def __init__(
        self, connection: ServerConnection, pool: ConnectionPool, target: Target, *, is_kept: bool
    ) -> None:
        self.connection = connection
        self._pool = pool
        self._target = target
        self._is_kept = is_kept
        self.status = connection.status
        self.headers = Headers(connection.headers)
        self.read_some = connection.read

    async def read(self) -> bytes:
        """Return the whole body."""
        pieces = []
        while piece := await self.read_some():
            pieces.append(piece)
        return b"".join(pieces)

    async def lines(self) -> AsyncIterator[bytes]:
        """Yield the lines of the body without their ends, of any length; what follows the last is dropped."""
        rest: list[bytes] = []
        while piece := await self.read_some():
            *complete, last = piece.split(b"\n")
            for line in complete:
                yield b"".join((*rest, line))
                rest.clear()
            rest.append(last)

    def close(self) -> None:
        self._pool.give_back(self.connection, self._target.origin, is_kept=self._is_kept)

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class HttpClient:
    """Sends requests with the bearer ``token``, to servers that ``tls`` verifies.

    With ``keeps_connections`` a connection serves the next request to its address, too. With ``unix_socket``
    all requests go to that socket, whatever host their URL names.
    """

    def __init__(
        self,
        token: str = "",
        tls: ClientTls = True,
        *,
        keeps_connections: bool = True,
        unix_socket: str = "",
        connect_timeout_s: float = timing.CONNECT_TIMEOUT_S,
    ) -> None:
        self._own_headers = f"Authorization: Bearer {token}\r\n" if token else ""
        self._tls = tls
        self._is_kept = keeps_connections
        self._unix_socket = unix_socket
        self._connect_timeout_s = connect_timeout_s
        self._pool: ConnectionPool | None = None
        self.is_closed = False

    async def send(
        self, method: str, url: str, body: bytes = b"", headers: Mapping[str, str] = NO_HEADERS
    ) -> Answer:
        """Send a request, and return its answer as soon as its status is there.

        A GET is sent once more where its kept connection turns out to have been closed. Raises NotConnected
        where no connection came about, else ConnectionError.
        """
        try:
            target = target_of(url, method)
        except ValueError as error:  # the standard library's word for a port or an IPv6 address that is none
            raise NotConnected(f"malformed address: {error}") from error
        more = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        kept = "" if self._is_kept else "Connection: close\r\n"
        length = f"Content-Length: {len(body)}\r\n" if body or method != "GET" else ""
        head = target.line + f"{self._own_headers}{length}{kept}{more}\r\n".encode("utf-8", "surrogateescape")
        pool = self._opened()
        connection = pool.pop_idle(target.origin) if self._is_kept else None
        if connection is not None:
            try:
                return await self._exchange(connection, pool, target, head, body)
            except ConnectionError:
                if method != "GET":
                    raise
        return await self._exchange(await self._connect(pool, target), pool, target, head, body)

    async def request(
        self,
        method: str,
        url: str,
        body: bytes = b"",
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        timeout_s: float | None,
    ) -> WholeAnswer:
        """Send a request, and return its whole answer, whatever its status.

        Raises ConnectionError when the connection fails, TimeoutError when the answer is not whole within
        ``timeout_s`` seconds (None: no limit).
        """
        async with asyncio.timeout(timeout_s):
            with await self.send(method, url, body, headers) as answer:
                return WholeAnswer(answer.status, answer.headers, await answer.read())

    async def get(self, url: str, *, timeout_s: float | None) -> WholeAnswer:
        """Get what is at that address; raises as ``request``, and ConnectionError if it is not status 200."""
        return (await self.request("GET", url, timeout_s=timeout_s)).checked()

    async def close(self) -> None:
        """Close every connection: answers that are being read break off. Nothing can be sent any more."""
        self.is_closed = True
        if self._pool is not None:
            self._pool.close()
            await asyncio.sleep(0)  # the sockets are closed in the loop's next turn

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _opened(self) -> ConnectionPool:
        if self.is_closed:
            raise NotConnected("the client is closed")
        if self._pool is None:  # not before: a loop must run
            self._pool = ConnectionPool(
                self._tls,
                StreamBatch(),
                unix_socket=self._unix_socket,
                connect_timeout_s=self._connect_timeout_s,
            )
        return self._pool

    async def _connect(self, pool: ConnectionPool, target: Target) -> ServerConnection:
        try:
            return await pool.open(target.origin)
        except TimeoutError as error:
            raise NotConnected(f"no connection within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            reason = describe_error(error) if isinstance(error, ssl.SSLError) else str(error)
            raise NotConnected(reason or type(error).__name__) from error
        except ValueError as error:  # the standard library's word for what is no name of a machine
            raise NotConnected(f"malformed address: {error}") from error

    async def _exchange(
        self, connection: ServerConnection, pool: ConnectionPool, target: Target, head: bytes, body: bytes
    ) -> Answer:
        try:
            await connection.send(head, body)
            await connection.wait_for_head()
        except BaseException:
            pool.give_back(connection, target.origin, is_kept=False)
            raise
        return Answer(connection, pool, target, is_kept=self._is_kept)


async def get(url: str, token: str = "", *, timeout_s: float, tls: ClientTls = True) -> WholeAnswer:
    """Get what is at that address, over a connection of its own; raises OSError unless the status is 200."""
    async with HttpClient(token, tls, keeps_connections=False, connect_timeout_s=timeout_s) as client:
        return await client.get(url, timeout_s=timeout_s)


async def try_get(url: str, *, timeout_s: float, unix_socket: str = "") -> WholeAnswer | None:
    """Get what a server of this host answers, whatever its status; None without an answer in time.

    Of a body that never ends there is what has come in time, or ``MAX_TRIED_BYTES``. The
    certificate is not checked: nobody can listen in between.
    """
    answer: Answer | None = None
    body = bytearray()
    own = HttpClient(tls=False, keeps_connections=False, unix_socket=unix_socket, connect_timeout_s=timeout_s)
    try:
        async with own as client, asyncio.timeout(timeout_s):
            with await client.send("GET", url) as answer:
                while len(body) < MAX_TRIED_BYTES and (piece := await answer.read_some()):
                    body += piece
    except OSError:
        if answer is None:
            return None
    return WholeAnswer(answer.status, answer.headers, bytes(body))
