"""The engine's side of a request: connections to the workers and their engines, and what their failures mean.

The request path knows engines by ``Upstream`` and ``EngineAnswer`` alone, and no type of the HTTP client.
A failure is one of two kinds. ``WorkerRefused``: the worker has certainly not begun with the request, so it
can go elsewhere as if nothing had happened. ``WorkerDied``: the worker may have begun; the request is tried
elsewhere too, but the deaths are counted, in case that it is the request that kills workers.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

import aiohttp

from dynaplan.gateway import timing
from dynaplan.gateway.openai_api import out_of_descriptors
from dynaplan.util.descriptors import descriptor_limit, is_exhausted
from dynaplan.util.http_routes import NO_TRACE
from dynaplan.util.tls import ClientTls

REFUSALS = frozenset({502, 503, 504})
"""HTTP statuses of a worker that drains or is not ready yet."""


MAX_WRITE_BYTES = 256 * 1024
"""Bytes of a body that are sent in one piece."""

MAX_LINE_BYTES = 1024 * 1024
"""Bytes of one line that are held back at most; a longer line is passed on in pieces."""

_Unanswered = (aiohttp.ClientError, ConnectionError, TimeoutError)

_is_reused: ContextVar[bool] = ContextVar("_is_reused", default=False)
"""True when the connection that this task was given last had carried a request before."""


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


class _Connector(aiohttp.TCPConnector):
    """Tells reused connections from new ones, at a fraction of the cost of aiohttp's tracing."""

    def __init__(self, **options: Any) -> None:
        super().__init__(limit=0, use_dns_cache=True, **options)
        self._used: WeakSet[Any] = WeakSet()

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Any:
        connection = await super().connect(req, traces, timeout)
        _is_reused.set(connection.protocol in self._used)
        self._used.add(connection.protocol)
        return connection


class Upstream:
    """Sends requests to workers with the workers' token, over kept connections or over new ones.

    ``tls`` is what workers that speak https are verified by.
    """

    def __init__(self, worker_token: str, tls: ClientTls = True) -> None:
        self._authorization = f"Bearer {worker_token}"
        self._kept = _session(_Connector(keepalive_timeout=timing.WORKER_KEEP_ALIVE_S, ssl=tls))
        self._new = _session(_Connector(force_close=True, ssl=tls), {"Connection": "close"})

    async def post(
        self,
        url: str,
        body: bytes,
        request_id: str,
        *,
        is_kept: bool = True,
        trace: Mapping[str, str] = NO_TRACE,
    ) -> EngineAnswer:
        """Post the request; return the answer as soon as its status is there. The caller closes it.

        ``trace`` are the headers of the client's trace.

        Raises WorkerRefused, or WorkerDied when the worker may have begun with the request. When a reused
        connection fails without a byte of an answer, the worker had most likely closed it as idle at that
        moment: the request is sent once more, over a new connection.
        """
        if not is_kept:
            return await self._post(self._new, url, body, request_id, trace)
        try:
            return await self._post(self._kept, url, body, request_id, trace)
        except WorkerDied:
            if not _is_reused.get():
                raise
        try:
            return await self._post(self._new, url, body, request_id, trace)
        except WorkerRefused as error:
            raise WorkerDied(
                str(error), is_connection_lost=True
            ) from None  # the first attempt may have reached it before it died

    async def close(self) -> None:
        """Close every connection to an engine, and break off the answers on them."""
        await self._kept.close()
        await self._new.close()

    async def _post(
        self,
        session: aiohttp.ClientSession,
        url: str,
        body: bytes,
        request_id: str,
        trace: Mapping[str, str],
    ) -> EngineAnswer:
        headers = {
            "Authorization": self._authorization,
            "Content-Type": "application/json",
            "X-Request-Id": request_id,
            **trace,
        }
        try:
            # aiohttp writes bytes at once, and a file piece by piece, so that other streams go on.
            data = body if len(body) <= MAX_WRITE_BYTES else io.BytesIO(body)
            response = await session.post(url, data=data, headers=headers)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            if is_exhausted(error):
                raise out_of_descriptors(descriptor_limit()) from None
            raise WorkerRefused(str(error)) from None
        except _Unanswered as error:
            raise WorkerDied(_reason(error), is_connection_lost=True) from None
        if response.status in REFUSALS:
            response.close()
            raise WorkerRefused(f"status {response.status}")
        return EngineAnswer(response)


class EngineAnswer:
    """The answer to one request, from its status to ``close``, which may come at any time."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._held = b""
        self.status = response.status

    def header(self, name: str) -> str | None:
        """Return the value of a header; None without it."""
        return self._response.headers.get(name)

    async def read_all(self) -> bytes:
        """Return the whole answer, the same at each call; raises WorkerDied."""
        try:
            return await self._response.read()
        except _Unanswered as error:
            raise WorkerDied(_reason(error), is_connection_lost=True) from None

    async def read_lines(self) -> bytes:
        """Return the next whole lines, so that no event is passed on in half; empty at the answer's end.

        Raises WorkerDied.
        """
        chunk = await self._read_some()
        if not self._held and chunk.endswith(b"\n"):
            return chunk
        return await self._complete_lines(chunk)

    async def _complete_lines(self, chunk: bytes) -> bytes:
        lines, self._held = self._held + chunk, b""
        while chunk:
            end = lines.rfind(b"\n") + 1 or (len(lines) if len(lines) > MAX_LINE_BYTES else 0)
            if end:
                self._held = lines[end:]
                return lines[:end]
            chunk = await self._read_some()
            lines += chunk
        return lines

    async def _read_some(self) -> bytes:
        try:
            return await self._response.content.readany()
        except _Unanswered as error:
            raise WorkerDied(_reason(error), is_connection_lost=True) from None

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else close it."""
        self._response.close()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _session(connector: aiohttp.TCPConnector, headers: dict[str, str] | None = None) -> aiohttp.ClientSession:
    """Make a session without a limit of connections and without a time limit for a whole answer."""
    return aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=timing.WORKER_CONNECT_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
    )
