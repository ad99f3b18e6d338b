"""A question for a server's health over a bare socket, for which any answer will do.

Only servers of this host are asked, so that certificates are not checked. Beside ``client``, which would cost
``serve`` 7 MiB for its parser: ``serve`` asks nothing else over HTTP.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

MAX_HEAD_BYTES = 4096
MAX_BODY_BYTES = 256 * 1024


async def get_health(url: str, within_s: float) -> bytes:
    """Return what ``GET {url}/health`` says first, from its status line on; b"" without an answer in time."""
    return await _ask(lambda: _connection(url), "/health", _head, within_s)


async def get_health_at(unix_socket: str | os.PathLike[str], within_s: float) -> bytes:
    """Return what ``GET /health`` on a unix socket says first; b"" without an answer in time."""
    path = os.fspath(unix_socket)
    return await _ask(lambda: asyncio.open_unix_connection(path), "/health", _head, within_s)


async def get_text(url: str, path: str, within_s: float) -> bytes:
    """Return all that ``GET {url}{path}`` says, at most 256 KiB; b"" without an answer in time."""
    return await _ask(lambda: _connection(url), path, _until_end, within_s)


async def _connection(url: str) -> Connection:
    address = urlsplit(url)
    if address.scheme != "https":
        return await asyncio.open_connection(address.hostname, address.port)
    from dynaplan.http.tls import unverified

    return await asyncio.open_connection(address.hostname, address.port, ssl=unverified())


async def _ask(
    connect: Callable[[], Awaitable[Connection]],
    path: str,
    read: Callable[[asyncio.StreamReader], Awaitable[bytes]],
    within_s: float,
) -> bytes:
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await connect()
            try:
                writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
                return await read(reader)
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return b""


async def _head(reader: asyncio.StreamReader) -> bytes:
    return await reader.read(MAX_HEAD_BYTES)


async def _until_end(reader: asyncio.StreamReader) -> bytes:
    received = b""
    while len(received) < MAX_BODY_BYTES and (more := await reader.read(MAX_HEAD_BYTES)):
        received += more
    return received
