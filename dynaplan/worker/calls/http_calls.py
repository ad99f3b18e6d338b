"""One call of one instance, over HTTP: POST with a JSON body, answered by a line of JSON per item."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import aiohttp

from dynaplan.store.instances import Instance
from dynaplan.util.errors import DeadlineExceeded, PermanentError, RequestRefused
from dynaplan.util.tls import ClientTls
from dynaplan.worker.calls.deadlines import timeout_headers

CONNECT_S = 2.0
IDLE_CONNECTION_S = 30.0
"""Shorter than the server keeps its side open, so that an idle connection is seldom found dead."""

JSON = {"Content-Type": "application/json"}


class NotTaken(Exception):
    """An instance did not take the request, or died before its first item: another one may have it."""


def worker_session(token: str, tls: ClientTls = True) -> aiohttp.ClientSession:
    """Make a session for calls between workers: it bears their token and has no limits.

    ``tls`` is what workers that speak https are verified by.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        headers={"Authorization": f"Bearer {token}"} if token else {},
    )


async def items_from(
    session: aiohttp.ClientSession, instance: Instance, body: bytes, deadline_s: float
) -> AsyncGenerator[Any, None]:
    """Yield the items that the instance answers with.

    Raises NotTaken when it cannot be reached, refuses, or is lost; RequestRefused when the request is at
    fault; DeadlineExceeded when the endpoint has noticed that the time is over; PermanentError when the
    endpoint failed.
    """
    what = f"{instance.component}.{instance.endpoint}"
    try:
        async with session.post(
            f"{instance.url}/{instance.endpoint}", data=body, headers=JSON | timeout_headers(deadline_s)
        ) as response:
            if response.status != 200:
                raise _refusal(what, response.status, await _error_text(response))
            async for line in _lines(response.content):
                yield _item(line, what)
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise NotTaken(f"{type(error).__name__}: {error}") from error


def _refusal(what: str, status: int, text: str) -> Exception:
    """Return the error that says whose fault a status is, and whether a retry helps."""
    match status:
        case 503:
            return NotTaken(text)
        case 504:
            return DeadlineExceeded(f"{what}: {text}")
        case 400:
            return RequestRefused(f"{what}: {text}")
        case 401:
            hint = "Its process and this one have different tokens: they belong to different deployments."
            return PermanentError(f"{what}: {text}", hint=hint)
    return PermanentError(f"{what}: {text}")


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines, of any length."""
    rest: list[bytes] = []
    async for chunk in content.iter_any():
        *complete, last = chunk.split(b"\n")
        for line in complete:
            yield b"".join((*rest, line))
            rest.clear()
        rest.append(last)


def _item(line: bytes, what: str) -> Any:
    item = json.loads(line)
    if isinstance(item, dict) and item.keys() == {"error", "error_type"}:
        if item["error_type"] == DeadlineExceeded.__name__:
            raise DeadlineExceeded(str(item["error"]))
        raise PermanentError(f"{what}: {item['error_type']}: {item['error']}")
    return item


async def _error_text(response: aiohttp.ClientResponse) -> str:
    text = await response.text()
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status}: {text[:200]}"
