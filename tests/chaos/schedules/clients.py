"""Clients of a simulated deployment, and the history of their requests."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from tests.chaos.history import Request, drawn
from tests.chaos.schedules.machine import Machine
from tests.chaos.schedules.network import PUBLIC_PORT
from tests.chaos.schedules.programs import MODEL

SHORT, LONG = "Why?", "word " * 60
"""A prompt that the decode worker computes, and one that a prefill worker does."""


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
        prompt, tokens = f"{number} {dice.choice([SHORT, LONG])}", dice.choice([2, 5, 5, 12, 40])
        return drawn(dice, number, self.machine.loop.time(), MODEL, prompt, tokens)

    async def send(self, request: Request) -> Request:
        self.history.append(request)
        url = f"http://127.0.0.1:{PUBLIC_PORT}{request.path}"
        try:
            async with self.session.post(url, json=request.body) as response:
                request.status = response.status
                if request.body.get("stream") and response.status == 200:
                    async for line in response.content:
                        request.read_line(line)
                else:
                    request.read_whole(await response.json())
        except aiohttp.ClientError as error:
            request.broken = repr(error)
        request.ended_s = self.machine.loop.time()
        return request
