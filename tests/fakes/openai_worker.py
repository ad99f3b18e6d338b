"""A decode worker that answers as told. It copies, of vLLM's OpenAI server behind a dynaplan worker server:

- a stream: compact JSON, for a chat first an event with the role and no text, then one event per token, the
  finish reason in the last one, a usage event only when asked for, ``data: [DONE]``;
- an answer that is no stream: one JSON document with its usage;
- the bearer token that every worker demands (401 without);
- a worker that drains: 503 with ``x-dynaplan-draining``; one that is killed: its connections end anyhow.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web

from dynaplan.domain.discovery import Instance
from dynaplan.ports import KeyValueStore

TOKEN = "worker-token"
MODEL = "sim-8b"


class FakeWorker:
    """One worker. ``act`` is what it does with a request.

    ``answer``; ``drain`` (503); ``refuse`` (400); ``die_before``: close the connection without a byte;
    ``die_at_role``: close it when only the role was sent; ``die_within``: close it after two tokens;
    ``stop_within``: end properly after two tokens, without [DONE]; ``hold_within``: send two tokens and then
    wait for ``go_on``; ``hold_before``: wait for ``go_on`` without a byte.
    """

    def __init__(self, name: str = "ns_VllmWorker", tokens: int = 5, act: str = "answer") -> None:
        self.name = name
        self.tokens = tokens
        self.act = act
        self.bodies: list[dict[str, Any]] = []
        self.cancelled = 0
        self.in_flight = 0
        self.go_on = asyncio.Event()
        self.card: dict[str, Any] = {
            "model": MODEL,
            "context_tokens": 8192,
            "tokenizer": "sim",
            "kv_block_tokens": 16,
        }
        self._runner: web.ServerRunner | None = None
        self._instance: Instance | None = None

    async def start(self) -> str:
        """Listen; the base address."""
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self.url

    @property
    def url(self) -> str:
        assert self._runner
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def register(self, store: KeyValueStore, number: int, component: str = "VllmWorker") -> Instance:
        """Put the registration, as the worker's runtime would (without a lease)."""
        url = self.url if self._runner else "http://127.0.0.1:9"
        instance = Instance("ns", component, "generate", number, url, self.name, 0, self.card)
        await store.put(instance.key, instance.to_json())
        return instance

    async def stop(self) -> None:
        """Stop listening and close every connection: what is left of a killed process."""
        if self._runner:
            await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "a valid worker token is needed"}, status=401)
        self.bodies.append(await request.json())
        self.in_flight += 1
        try:
            return await self._act(request, self.bodies[-1])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _act(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if self.act == "drain":
            return web.json_response({}, status=503, headers={"x-dynaplan-draining": "1"})
        if self.act == "refuse":
            return web.json_response({"error": {"message": "no", "type": "x"}}, status=400)
        if self.act == "die_before":
            return _cut(request)
        if self.act == "hold_before":
            await self.go_on.wait()
        is_chat = request.path.endswith("/chat/completions")
        if body.get("stream"):
            return await self._stream(request, body, is_chat)
        return web.json_response(self._whole(is_chat))

    async def _stream(
        self, request: web.BaseRequest, body: dict[str, Any], is_chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if is_chat:
            await response.write(
                _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            )
        if self.act == "die_at_role":
            return _cut(request, response)
        for number in range(self.tokens):
            if number == 2 and self.act != "answer":
                if self.act == "stop_within":
                    return response
                if self.act == "die_within":
                    return _cut(request, response)
                await self.go_on.wait()
            await response.write(_event(self._token(number, is_chat)))
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event({"choices": [], "usage": self._usage()}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _token(self, number: int, is_chat: bool) -> dict[str, Any]:
        text = f"t{number} "
        reason = "length" if number == self.tokens - 1 else None
        content: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        return {"id": "x", "model": MODEL, "choices": [{"index": 0, **content, "finish_reason": reason}]}

    def _whole(self, is_chat: bool) -> dict[str, Any]:
        text = "".join(f"t{number} " for number in range(self.tokens))
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        )
        return {"id": "x", "choices": [{"index": 0, **content}], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": self.tokens, "total_tokens": 7 + self.tokens}


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _cut(request: web.BaseRequest, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """End the connection as a killed process does: what was written arrives, then nothing more."""
    assert request.transport
    request.transport.close()
    return response or web.Response()
