"""A client that streams chat completions for as long as it is told, and judges every answer.

An answer is complete when it has exactly the tokens asked for (``ignore_eos`` with ``max_tokens``), a finish
reason, and the closing ``[DONE]``.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Self

import aiohttp


@dataclass
class Outcome:
    """What became of one request; ``chunks`` are the pieces of text that came."""

    status: int = 0
    tokens: int = 0
    chunks: int = 0
    wanted_tokens: int = 0
    finish_reason: str = ""
    is_done: bool = False
    error: str = ""
    first_token_s: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.status == 200 and self.is_done and self.tokens == self.wanted_tokens and not self.error


@dataclass
class Load:
    """``clients`` clients, each sending the next request as soon as its last one has ended.

    ``keeps_connections`` is False where each request is to make a connection of its own.
    """

    url: str
    model: str
    clients: int = 4
    tokens: int = 40
    prompt: str = "Tell me about the lights of the city. " * 12
    keeps_connections: bool = True
    outcomes: list[Outcome] = field(default_factory=list)
    begun: list[Outcome] = field(default_factory=list)
    _stopping: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=not self.keeps_connections),
            timeout=aiohttp.ClientTimeout(total=120),
        )
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self.clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def send_no_more(self) -> None:
        """Send nothing new; what is open goes on."""
        self._stopping = True

    async def stop(self) -> None:
        """Send nothing new; return when every open request has ended."""
        self.send_no_more()
        await asyncio.gather(*self._tasks)
        await self._session.close()

    async def _client(self, number: int) -> None:
        count = 0
        while not self._stopping:
            count += 1
            prompt = f"{number}.{count} {self.prompt}"
            outcome = Outcome(wanted_tokens=self.tokens)
            self.begun.append(outcome)
            await stream_into(outcome, self._session, self.url, self.model, prompt)
            self.outcomes.append(outcome)

    def streams(self) -> bool:
        """Tell whether every client has a stream open that has begun to answer."""
        return sum(outcome.chunks > 0 for outcome in self.open) == self.clients

    @property
    def open(self) -> list[Outcome]:
        """The requests that have not ended yet."""
        return [outcome for outcome in self.begun if not (outcome.is_done or outcome.error)]

    @property
    def incomplete(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.is_complete]


async def stream_one(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: str,
    tokens: int,
    headers: dict[str, str] | None = None,
) -> Outcome:
    """Stream one chat completion to its end; never raises for what the server does."""
    outcome = Outcome(wanted_tokens=tokens)
    await stream_into(outcome, session, url, model, prompt, headers)
    return outcome


async def stream_into(
    outcome: Outcome,
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: str,
    headers: dict[str, str] | None = None,
) -> None:
    """``stream_one`` into an outcome that another task may watch."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "max_tokens": outcome.wanted_tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = (await response.text())[:300]
                return
            async for line in response.content:
                _read_line(line.decode().strip(), outcome)
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        outcome.error = f"{type(error).__name__}: {error}"


def _read_line(line: str, outcome: Outcome) -> None:
    if not line.startswith("data:"):
        return
    data = line[5:].strip()
    if data == "[DONE]":
        outcome.is_done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        outcome.error = str(chunk["error"])[:300]
    usage = chunk.get("usage")
    if usage:
        outcome.tokens = usage["completion_tokens"]
    for choice in chunk.get("choices", ()):
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        outcome.chunks += bool(choice.get("delta", {}).get("content"))
