"""Replays a trace against a frontend, open loop, and measures what a client sees.

One protocol object per connection costs as little CPU as Python can: the deployment shares the cores.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit
from uuid import uuid4

from dynaplan.contract.traced_requests import TracedRequest

BYTES_PER_TOKEN = 4
"""Of the simulated engine's tokenizer."""

FILLER = "all work and no play makes jack a dull boy; "


@dataclass
class Seen:
    """One request. ``lag_s`` is how late it was sent, ``ttft_s`` counts from when it was sent."""

    lag_s: float = 0.0
    ttft_s: float = 0.0
    itl_s: float | None = None
    is_whole: bool = False


def percentile(values: Iterable[float], percent: float) -> float:
    """The value that so many per cent do not exceed."""
    ordered = sorted(values)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]


async def replay(url: str, model: str, trace: Sequence[TracedRequest], begin_s: float) -> list[Seen]:
    """Send each request at its time; what became of them, in the trace's order, when all have ended.

    ``begin_s`` is when the trace begins, on the machine's monotonic clock.
    """
    loop = asyncio.get_running_loop()
    pool = _Pool(url)
    tasks = []
    for request in trace:
        data = _request(pool.host, model, request)
        due_s = begin_s + request.arrival_s
        await asyncio.sleep(due_s - loop.time())
        tasks.append(asyncio.create_task(pool.send(data, request.output_tokens, loop.time() - due_s)))
    seen = await asyncio.gather(*tasks)
    pool.close()
    return seen


class _Pool:
    """Keep-alive connections; there are as many as requests were ever in flight at once."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self.host = address.netloc
        self._where = str(address.hostname), int(address.port or 80)
        self._idle: list[_Connection] = []

    async def send(self, data: bytes, tokens: int, lag_s: float) -> Seen:
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        if self._idle:
            connection = self._idle.pop()
        else:
            _, connection = await loop.create_connection(_Connection, *self._where)
        await connection.ask(data)
        first_s, last_s = connection.first_s, connection.last_s
        is_whole = connection.is_whole(tokens)
        if is_whole:
            self._idle.append(connection)
        else:
            connection.transport.close()
        itl_s = (last_s - first_s) / (tokens - 1) if tokens > 1 else None
        return Seen(lag_s, first_s - sent_s, itl_s, is_whole)

    def close(self) -> None:
        for connection in self._idle:
            connection.transport.close()


LAST_CHUNK = b"\r\n0\r\n\r\n"
"""The end of a chunked answer. Without the first line end, a head that ends in 0 looks like it."""


class _Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._loop = asyncio.get_running_loop()

    def ask(self, data: bytes) -> asyncio.Future[None]:
        """Send the request; done when its answer has ended, or the connection has."""
        self.received = bytearray()
        self.first_s = self.last_s = 0.0
        self._ended = self._loop.create_future()
        self.transport.write(data)
        return self._ended

    def data_received(self, data: bytes) -> None:
        self.last_s = self._loop.time()
        self.first_s = self.first_s or self.last_s  # no header comes before the first token
        self.received += data
        if self.received.endswith(LAST_CHUNK) or not self.received.startswith(b"HTTP/1.1 200"):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def is_whole(self, tokens: int) -> bool:
        is_ended = b"data: [DONE]" in self.received and self.received.endswith(LAST_CHUNK)
        return is_ended and self.received.count(b"data: {") == tokens

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


def _request(host: str, model: str, request: TracedRequest) -> bytes:
    """A prompt of exactly so many tokens; no cache has seen its beginning."""
    length = request.prompt_tokens * BYTES_PER_TOKEN
    prompt = (f"{uuid4().hex} " + FILLER * (length // len(FILLER) + 1))[:length]
    document = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
    }
    body = json.dumps(document).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
