"""A decode worker that answers as told. It copies, of vLLM's OpenAI server behind a dynaplan worker server:

- a stream: compact JSON, for a chat first an event with the role and no text, then one event per token, the
  finish reason in the last one, a usage event only when asked for, ``data: [DONE]``;
- an answer that is no stream: one JSON document with its usage;
- the bearer token that every worker demands (401 without);
- vLLM as it shuts down: ``finish_reason`` ``abort`` and [DONE]; or an error event and [DONE]; or status 500;
- a server that closes a kept connection (llama.cpp's): the second request over it ends without a byte;
- llama.cpp workers of a disaggregated graph: ``/kv_slots/reserve`` waits for a slot, ``/kv_slots/release``;
- a request that ends with the beginning of its answer (``continue_final_message``, or a completion's prompt):
  what follows comes, in a stream; a text without its last white space gets that again first;
- a worker that drains: 503 with ``x-dynaplan-draining``; one that is killed: its connections end anyhow.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

from aiohttp import web

from dynaplan.store.instances import Instance
from dynaplan.store.port import KeyValueStore

TOKEN = "worker-token"
MODEL = "sim-8b"


class FakeWorker:
    """One worker. ``act`` is what it does with a request.

    - ``answer``; ``drain`` (503); ``refuse`` (400); ``error_500``; ``lack`` (404, with ``lacks``);
    - ``hold_error_500``: that, after ``go_on``;
    - ``die_before``: close the connection without a byte; ``die_at_role``: when only the role was sent;
      ``die_within``: after two tokens; ``cut_kept``: when the second request comes over it;
    - ``stop_within``: end properly after two tokens, without [DONE];
    - ``hold_before``: wait for ``go_on`` without a byte; ``hold_at_role``: when the stream has begun without
      a token; ``hold_within``: after two tokens;
    - ``abort``: give the request up before the first token, and end properly; ``abort_within``: after two
      tokens and ``go_on``; ``error``, ``error_within``: the same by an error event with ``error_code``.

    ``reserve_act`` is what it does for a slot: ``answer``, ``drain``, ``hold_before``, ``error_500``.
    """

    def __init__(self, name: str = "ns_VllmWorker", tokens: int = 5, act: str = "answer") -> None:
        self.name = name
        self.tokens = tokens
        self.act = act
        self.error_code = 500
        self.error_message = "shut down"
        self.lacks: dict[str, Any] = {}
        self.reserve_act = "answer"
        self.engine_url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.reserved: list[dict[str, Any]] = []
        self.released: list[str] = []
        self.connections: list[object] = []
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
        self._socket: socket.socket | None = None
        """Its own: ``create_server`` of the loop leaves one behind when it is cancelled."""
        self._instance: Instance | None = None

    async def start(self) -> str:
        """Listen; the base address."""
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        self._socket = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(self._runner, self._socket).start()
        return self.url

    @property
    def url(self) -> str:
        assert self._runner
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def register(self, store: KeyValueStore, number: int, component: str = "VllmWorker") -> Instance:
        """Put the registration, as the worker's runtime would (without a lease)."""
        url = self.url if self._runner else "http://127.0.0.1:9"
        instance = Instance(
            "ns", component, "generate", number, url, self.name, 0, self.card, self.engine_url
        )
        await store.put(instance.key, instance.to_json())
        return instance

    async def stop(self) -> None:
        """Stop listening and close every connection: what is left of a killed process."""
        if self._runner:
            await self._runner.cleanup()
        if self._socket:
            self._socket.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "a valid worker token is needed"}, status=401)
        if request.path.startswith("/kv_slots/"):
            return await self._slots(request, await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if request.content_type == "multipart/form-data":  # the form itself, for a test to look at
            return web.Response(body=await request.read(), content_type="application/octet-stream")
        self.bodies.append(await request.json())
        self.in_flight += 1
        try:
            return await self._act(request, self.bodies[-1])
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.in_flight -= 1

    async def _slots(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if request.path.endswith("/release"):
            self.released.append(body["request_id"])
            return web.json_response({})
        self.reserved.append(body)
        if self.reserve_act == "drain":
            return web.json_response({}, status=503, headers={"x-dynaplan-draining": "1"})
        if self.reserve_act == "error_500":
            return web.json_response({"error": "it failed"}, status=500)
        if self.reserve_act == "hold_before":
            await self.go_on.wait()
        return web.json_response({"fields": {"id_slot": 2, "cache_prompt": True}})

    async def _act(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if self.act == "drain":
            return web.json_response({}, status=503, headers={"x-dynaplan-draining": "1"})
        if self.act == "refuse":
            return web.json_response({"error": {"message": "no", "type": "x"}}, status=400)
        if self.act == "hold_error_500":
            await self.go_on.wait()
        if self.act in ("error_500", "hold_error_500"):
            return web.json_response({"error": {"message": self.error_message, "code": 500}}, status=500)
        if self.act == "lack":
            return web.json_response(self.lacks, status=404)
        is_kept = request.transport in self.connections
        self.connections.append(request.transport)
        if self.act == "die_before" or (self.act == "cut_kept" and is_kept):
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
        await self._begin(response, is_chat)
        if self.act == "die_at_role":
            return _cut(request, response)
        if self.act in ("abort", "error"):
            return await self._give_up(response, is_chat)
        begun = _begun(body, is_chat)
        for number in range(begun, self.tokens):
            if number == 2 + begun and self.act not in ("answer", "cut_kept", "hold_at_role"):
                if self.act == "stop_within":
                    return response
                if self.act == "die_within":
                    return _cut(request, response)
                if self.act in ("abort_within", "error_within"):
                    await self.go_on.wait()
                    return await self._give_up(response, is_chat)
                await self.go_on.wait()
            await response.write(_event(self._token(number, is_chat, is_first=0 < begun == number)))
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(_event({"choices": [], "usage": self._usage(begun)}))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _begin(self, response: web.StreamResponse, is_chat: bool) -> None:
        if is_chat:
            await response.write(
                _event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            )
        if self.act == "hold_at_role":
            await self.go_on.wait()

    async def _give_up(self, response: web.StreamResponse, is_chat: bool) -> web.StreamResponse:
        if self.act.startswith("error"):
            await response.write(_event({"error": {"message": "cannot go on", "code": self.error_code}}))
        else:
            content: dict[str, Any] = {"delta": {"content": ""}} if is_chat else {"text": ""}
            await response.write(_event({"choices": [{"index": 0, **content, "finish_reason": "abort"}]}))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _token(self, number: int, is_chat: bool, is_first: bool = False) -> dict[str, Any]:
        text = f" t{number} " if is_first else f"t{number} "
        reason = "length" if number == self.tokens - 1 else None
        content: dict[str, Any] = {"delta": {"content": text}} if is_chat else {"text": text}
        choice = {"index": 0, **content, "finish_reason": reason}
        return {"id": f"x{self.name}", "created": id(self), "model": MODEL, "choices": [choice]}

    def _whole(self, is_chat: bool) -> dict[str, Any]:
        text = "".join(f"t{number} " for number in range(self.tokens))
        content: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        )
        reason = "abort" if self.act == "abort" else "length"
        choice = {"index": 0, **content, "finish_reason": reason}
        return {"id": "x", "choices": [choice], "usage": self._usage()}

    def _usage(self, begun: int = 0) -> dict[str, int]:
        rest = self.tokens - begun
        return {"prompt_tokens": 7 + begun, "completion_tokens": rest, "total_tokens": 7 + self.tokens}


def _begun(body: dict[str, Any], is_chat: bool) -> int:
    """The number of its tokens that are there already."""
    if is_chat and not body.get("continue_final_message"):
        return 0
    text = body["messages"][-1]["content"] if is_chat else body["prompt"]
    return len(re.findall(r"t\d\b", text))


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def _cut(request: web.BaseRequest, response: web.StreamResponse | None = None) -> web.StreamResponse:
    """End the connection as a killed process does: what was written arrives, then nothing more."""
    assert request.transport
    request.transport.close()
    return response or web.Response()
