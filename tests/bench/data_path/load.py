"""Closed-loop load: ``python -m tests.bench.data_path.load PORT STREAMS TOKENS REQUESTS [KEYS]``.

With KEYS, each stream bears one of so many keys, ``sk-bench0`` and so on, or none where it is 0; and answers
have half of TOKENS to one and a half: streams of one length begin and end together for ever, which costs less
than requests that come one by one, and a queue would end it.

Prints one line of JSON when connections stand and every stream has had one answer, and one at the end:
``seconds``, ``failures``, and in ms the ``ttft``, the ``itl`` and the ``whole`` answer as p50 and p99.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import httptools
import uvloop

from tests.bench.data_path.workers import MODEL

PROMPT = " ".join(["Why is the sky blue at noon?"] * 28)
"""About 200 words."""

_TOKEN = b'"content":" '

LONGEST_S = 300.0


class Load:
    """Counts what is left to send, and gathers times."""

    def __init__(self, tokens: int, requests: int, keys: int | None = None) -> None:
        lengths = [tokens] if keys is None else [tokens // 2 + each * 7 % tokens for each in range(tokens)]
        headers = [f"Authorization: Bearer sk-bench{key}\r\n" for key in range(keys or 0)] or [""]
        self.requests = [[request(length, header) for length in lengths] for header in headers]
        self.left = requests
        self.failures = 0
        self.first_fault = b""
        self.ttft_s: list[float] = []
        self.itl_s: list[float] = []
        self.whole_s: list[float] = []

    def fault(self, answer: bytes) -> None:
        self.failures += 1
        self.first_fault = self.first_fault or answer


def request(tokens: int, further_header: str = "") -> bytes:
    document = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}]}
    body = json.dumps({**document, "max_tokens": tokens, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}{further_header}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Stream(asyncio.Protocol):
    """One connection, and one request after the other on it."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._requests = load.requests[number % len(load.requests)]
        self._transport: Any = None
        self._sent_s = self._last_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def _send(self) -> None:
        if not self._load.left:
            self.done.set_result(None)
            return
        self._load.left -= 1
        self._sent_s, self._last_s = time.perf_counter(), 0.0
        self._transport.write(self._requests[self._load.left % len(self._requests)])

    def data_received(self, data: bytes) -> None:
        now_s, load = time.perf_counter(), self._load
        if self._last_s:
            load.itl_s.append(now_s - self._last_s)
        if self._last_s or _TOKEN in data:  # the role comes at once, from whom does not wait for a token
            if not self._last_s:
                load.ttft_s.append(now_s - self._sent_s)
            self._last_s = now_s
        self._parser.feed_data(data)

    def on_status(self, _: bytes) -> None:
        if self._parser.get_status_code() != 200:
            self._load.fault(b"status %d" % self._parser.get_status_code())

    def on_message_complete(self) -> None:
        self._load.whole_s.append(time.perf_counter() - self._sent_s)
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self._load.fault(b"the connection was closed")
            self.done.set_result(None)


def percentiles_ms(values_s: list[float]) -> list[float]:
    ordered = sorted(values_s) or [0.0]
    return [round(1000 * ordered[int(part * (len(ordered) - 1))], 3) for part in (0.5, 0.99)]


async def run(port: int, load: Load, streams: int) -> float:
    """Send the load; return the seconds that it took."""
    loop = asyncio.get_running_loop()
    begun_s = time.perf_counter()
    pairs = [
        await loop.create_connection(lambda number=number: Stream(load, number), "127.0.0.1", port)
        for number in range(min(streams, load.left))
    ]
    async with asyncio.timeout(LONGEST_S):
        await asyncio.gather(*(stream.done for _, stream in pairs))
    seconds = time.perf_counter() - begun_s
    for transport, _ in pairs:
        transport.close()
    return seconds


async def main(port: int, streams: int, tokens: int, requests: int, keys: int | None = None) -> None:
    await run(port, Load(2, streams, keys), streams)
    print(json.dumps("ready"), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    load = Load(tokens, requests, keys)
    seconds = await run(port, load, streams)
    by_name = {"ttft_ms": load.ttft_s, "itl_ms": load.itl_s, "whole_ms": load.whole_s}
    times = {name: percentiles_ms(values_s) for name, values_s in by_name.items()}
    counts = {"failures": load.failures, "fault": repr(load.first_fault[:300])}
    print(json.dumps({"seconds": seconds, **counts, **times}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*(int(each) for each in sys.argv[1:])))
