"""The lower bound, a proxy with nothing to it: ``python -m tests.bench.data_path.sketch PORT WORKER_PORT``

Round-robin, connections kept, tokens counted and errors looked for in place; an answer's bytes pass on with
the framing in which they came, one write for each read. It trusts both sides, routes by no state, and knows
no limit, no death and no client that leaves.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import httptools
import uvloop

COUNTS = {"tokens": 0, "errors": 0}


class Upstream(asyncio.Protocol):
    """A connection to a worker, kept in the pool between answers."""

    def __init__(self, pool: list[Upstream]) -> None:
        self._pool = pool
        self.transport: Any = None
        self.client: Client | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        COUNTS["tokens"] += data.count(b"data: {")
        if b'"error"' in data:
            COUNTS["errors"] += 1
        if self.client:
            self.client.transport.write(data)
        if data.endswith(b"0\r\n\r\n"):
            self.client = None
            self._pool.append(self)


class Client(asyncio.Protocol):
    """A client's connection: each request is sent on whole."""

    def __init__(self, workers: itertools.cycle[tuple[int, list[Upstream]]]) -> None:
        self._workers = workers
        self._body: list[bytes] = []
        self._url = b""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body, self._body = b"".join(self._body), []
        head = b"POST %b HTTP/1.1\r\nHost: w\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        request = head % (self._url, len(body)) + body
        port, pool = next(self._workers)
        if pool:
            self._send(pool.pop(), request)
        else:
            self._connecting = asyncio.ensure_future(self._connect(port, pool, request))

    async def _connect(self, port: int, pool: list[Upstream], request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: Upstream(pool), "127.0.0.1", port)
        self._send(upstream, request)

    def _send(self, upstream: Upstream, request: bytes) -> None:
        upstream.client = self
        upstream.transport.write(request)


async def serve(port: int, worker_ports: list[int]) -> None:
    workers: itertools.cycle[tuple[int, list[Upstream]]] = itertools.cycle(
        [(each, []) for each in worker_ports]
    )
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Client(workers), "127.0.0.1", port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))
