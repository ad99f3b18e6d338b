"""Two simulated workers in one process: ``python -m tests.bench.data_path.workers PORT PORT STEP_MS``.

They decode as engines do: in steps, of which each gives every running stream one token, as a write and an
HTTP chunk of its own. A step of 0 ms follows the last one at once. Prefill takes no time: the first token
comes at once, or what is called TTFT would be the time until the next step, whenever the request came. They
copy vLLM's events: one with the role, one for each token, and ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import httptools
import uvloop

MODEL = "sim-8b"

_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
_MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
_INFO = json.dumps({"status": "ok", "model_id": MODEL, "model_path": MODEL, "is_generation": True}).encode()


def event(delta: dict[str, str], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    document = {"id": "chatcmpl-5f2d", "object": "chat.completion.chunk", "created": 1795000000}
    text = json.dumps({**document, "model": MODEL, "choices": [choice]}, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ROLE = chunk(event({"role": "assistant", "content": ""}))
TOKEN = chunk(event({"content": " word"}))
LAST = chunk(event({"content": " end"}, "length")) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Engine:
    """Gives every running stream a token in each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[Worker, int] = {}
        self._loop = asyncio.get_running_loop()
        self._next_s = 0.0

    def start(self, stream: Worker, tokens: int) -> None:
        if not self._running:
            now_s = self._loop.time()
            # All engines step at the same times, whenever they began: how many tokens a frontend finds at
            # once decides what it costs.
            self._next_s = now_s - now_s % self._step_s if self._step_s else now_s
            self._plan()
        self._running[stream] = tokens

    def stop(self, stream: Worker) -> None:
        self._running.pop(stream, None)

    def _plan(self) -> None:
        self._next_s = max(self._next_s + self._step_s, self._loop.time())
        self._loop.call_at(self._next_s, self._step)

    def _step(self) -> None:
        for stream, left in list(self._running.items()):
            stream.write(LAST if left == 1 else TOKEN)
            if left == 1:
                del self._running[stream]
            else:
                self._running[stream] = left - 1
        if self._running:
            self._plan()


class Worker(asyncio.Protocol):
    """One connection to a worker."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._transport: Any = None
        self._parser: Any = None
        self._body = b""
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:  # a router that tries HTTP/2 first
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.stop(self)

    def on_message_begin(self) -> None:
        self._body = self._url = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        if tokens := _MAX_TOKENS.search(self._body):
            left = int(tokens[1]) - 1
            self.write(_HEAD + ROLE + (TOKEN if left else LAST))
            if left:
                self._engine.start(self, left)
            return
        body = _MODELS if self._url.startswith(b"/v1/models") else _INFO
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.write(head + body)

    def write(self, data: bytes) -> None:
        self._transport.write(data)


BACKLOG = 2048
"""As uvicorn's, and so vLLM's and SGLang's: of 1,000 connections at once none has to be tried again."""


async def serve(ports: list[int], step_ms: float) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        engine = Engine(step_ms / 1000)
        await loop.create_server(
            lambda engine=engine: Worker(engine),  # type: ignore[misc]
            "127.0.0.1",
            port,
            backlog=BACKLOG,
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    *listen_on, step = sys.argv[1:]
    uvloop.run(serve([int(each) for each in listen_on], float(step)))
