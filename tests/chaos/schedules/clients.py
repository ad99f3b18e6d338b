"""Clients of a simulated deployment, and the history of their requests."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from dynaplan.adapters.engines.sim.api import answer_offset, read_request
from tests.chaos.schedules.machine import Machine
from tests.chaos.schedules.network import PUBLIC_PORT
from tests.chaos.schedules.programs import MODEL, answers

SHORT, LONG = "Why?", "word " * 60
"""A prompt that the decode worker computes, and one that a prefill worker does."""


@dataclass
class Request:
    """One request and what its client saw; ``whole`` is the text that it must get."""

    number: int
    body: dict[str, Any]
    path: str
    sent_s: float
    whole: str
    ended_s: float = 0.0
    status: int = 0
    text: str = ""
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    finish_reason: str = ""
    tokens: int = -1
    ends: int = 0
    error: str = ""
    broken: str = ""
    """The failure of the connection to the frontend; empty without one."""

    @property
    def is_whole(self) -> bool:
        is_ended = self.ends == 1 if self.body.get("stream") else True
        return self.status == 200 and is_ended and not (self.error or self.broken)

    def __str__(self) -> str:
        seen = f"{self.status} {self.error or self.broken or self.finish_reason} {len(self.text)} characters"
        kind = "stream" if self.body.get("stream") else "whole"
        asked = f"{kind}, {self.body.get('max_tokens')} tokens"
        return f"request {self.number} ({asked}) of {self.sent_s:.3f}: {seen}"


def expected(body: dict[str, Any], path: str) -> str:
    """The simulated engine's whole answer: greedy, so one text for each prompt."""
    asked = read_request(body, is_chat="chat" in path, model=MODEL, context_tokens=8192)
    asked = answers(0).stopped(asked)
    pieces = answers(0).pieces(answer_offset(asked.question), 0, asked.max_tokens)
    text = json.loads(b'"%b"' % b"".join(pieces))
    return str(text[: asked.characters] if asked.characters is not None else text)


class Clients:
    """Clients that each send the next request a while after the last one's end."""

    def __init__(self, machine: Machine, count: int) -> None:
        self.machine = machine
        self.history: list[Request] = []
        self.is_over = False
        self.process = machine.spawn("clients", self._run)
        self._count = count

    @property
    def open(self) -> list[Request]:
        return [request for request in self.history if not request.ended_s]

    async def _run(self, process: Any) -> int:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True, limit=0)
        ) as session:
            self.session = session
            await asyncio.gather(*(self._client() for _ in range(self._count)))
        return 0

    async def _client(self) -> None:
        dice = self.machine.dice
        while not self.is_over:
            await asyncio.sleep(dice.choice([0.05, 0.5, 2.0]))
            if not self.is_over:
                await self.send(self.drawn())

    def drawn(self) -> Request:
        dice, number = self.machine.dice, len(self.history)
        prompt = f"{number} {dice.choice([SHORT, LONG])}"
        path = dice.choice(["/v1/chat/completions", "/v1/completions"])
        body: dict[str, Any] = {"model": MODEL, "max_tokens": dice.choice([2, 5, 5, 12, 40])}
        body |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
        if dice.random() < 0.8:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if dice.random() < 0.2:
            body["stop"] = [" the ", "zzz"]
        loop = self.machine.loop
        return Request(number, body, path, loop.time(), expected(body, path))

    async def send(self, request: Request) -> Request:
        self.history.append(request)
        url = f"http://127.0.0.1:{PUBLIC_PORT}{request.path}"
        try:
            async with self.session.post(url, json=request.body) as response:
                request.status = response.status
                if request.body.get("stream") and response.status == 200:
                    async for line in response.content:
                        self._read(request, line)
                else:
                    self._read_whole(request, await response.json())
        except aiohttp.ClientError as error:
            request.broken = repr(error)
        request.ended_s = self.machine.loop.time()
        return request

    def _read_whole(self, request: Request, document: dict[str, Any]) -> None:
        if request.status != 200:
            request.error = str(document["error"]["message"])
            return
        [choice] = document["choices"]
        request.text = choice.get("text") or choice.get("message", {}).get("content", "")
        request.finish_reason = choice["finish_reason"]
        request.tokens = document["usage"]["completion_tokens"]

    def _read(self, request: Request, line: bytes) -> None:
        if not line.startswith(b"data: "):
            return
        if line.strip() == b"data: [DONE]":
            request.ends += 1
            return
        document = json.loads(line[6:])
        if "error" in document:
            request.error = str(document["error"]["message"])
            return
        request.ids.add(document["id"])
        if usage := document.get("usage"):
            request.tokens = usage["completion_tokens"]
        for choice in document["choices"]:
            delta = choice.get("delta", {})
            request.roles += "role" in delta
            request.text += choice.get("text") or delta.get("content") or ""
            request.finish_reason = choice.get("finish_reason") or request.finish_reason
