"""A closed-loop load generator that costs as little CPU as Python can: one protocol object per connection.

It speaks just enough HTTP/1.1 for one keep-alive connection with chunked answers: an answer is over at the
last chunk, its tokens are its ``data: {`` events.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass
class Result:
    """What one run saw."""

    seconds: float = 0.0
    requests: int = 0
    failures: int = 0
    latencies_s: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    def __init__(self, run: _Run) -> None:
        self.run = run
        self.received = bytearray()
        self.sent_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def send(self) -> None:
        if not self.run.take():
            self.transport.close()
            return
        self.received.clear()
        self.sent_s = time.perf_counter()
        self.transport.write(self.run.request)

    def data_received(self, data: bytes) -> None:
        self.received += data
        if self.received.endswith(b"\r\n0\r\n\r\n"):
            is_whole = self.received.startswith(b"HTTP/1.1 200") and b"data: [DONE]" in self.received
            self.run.finished(time.perf_counter() - self.sent_s, is_whole)
            self.send()
        elif b"Content-Length" in self.received[:400] and not self.received.startswith(b"HTTP/1.1 200"):
            self.run.finished(time.perf_counter() - self.sent_s, False)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.run.closed()


class _Run:
    def __init__(self, request: bytes, count: int, connections: int) -> None:
        self.request = request
        self.left = count
        self.open = connections
        self.result = Result()
        self.done = asyncio.Event()

    def take(self) -> bool:
        self.left -= 1
        return self.left >= 0

    def finished(self, latency_s: float, is_whole: bool) -> None:
        self.result.requests += 1
        self.result.failures += not is_whole
        self.result.latencies_s.append(latency_s)

    def closed(self) -> None:
        self.open -= 1
        if self.open == 0:
            self.done.set()


QUESTION = "Why is the sky blue?"


async def generate(
    url: str, model: str, requests: int, concurrency: int, tokens: int, prompt: str = QUESTION
) -> Result:
    """Send that many streaming chat completions over that many connections; at most 120 s."""
    address = urlsplit(url)
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "stream": True,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    run = _Run(head.encode() + body, requests, concurrency)
    loop = asyncio.get_running_loop()
    started_s = time.perf_counter()
    await asyncio.gather(
        *(
            loop.create_connection(lambda: _Connection(run), address.hostname, address.port)
            for _ in range(concurrency)
        )
    )
    await asyncio.wait_for(run.done.wait(), 120)
    run.result.seconds = time.perf_counter() - started_s
    return run.result
