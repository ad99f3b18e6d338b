"""Requests for several models at once, streamed and not, and what became of each."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class Answer:
    """One request's end. ``fault`` is empty for a whole answer of the model that was asked for."""

    model: str
    is_stream: bool
    fault: str
    seconds: float
    request_id: str = ""


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, *, is_stream: bool, tokens: int, prompt: str = ""
) -> Answer:
    """Send one request and read its answer to the end."""
    begun_s = time.monotonic()
    body = {
        "model": model,
        "stream": is_stream,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": prompt or f"Say something about {model}."}],
    }
    request_id, fault = "", ""
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            request_id = response.headers.get("X-Request-Id", "")
            text = await response.text()
            fault = _stream_fault(text) if is_stream else _whole_fault(text)
            if response.status != 200:
                fault = f"{response.status}: {text}"
    except (aiohttp.ClientError, TimeoutError) as error:
        fault = repr(error)
    return Answer(model, is_stream, fault, time.monotonic() - begun_s, request_id)


def _stream_fault(text: str) -> str:
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return f"cut: {text[-200:]}"
    chunks = [json.loads(each) for each in events[:-1]]
    return "" if any(each["choices"][0]["delta"].get("content") for each in chunks) else f"no token: {text}"


def _whole_fault(text: str) -> str:
    try:
        return "" if json.loads(text)["choices"][0]["message"]["content"] else f"no token: {text}"
    except (ValueError, KeyError, TypeError):
        return text[:200]


async def mixed(
    url: str, models: Sequence[str], *, requests: int, clients: int, tokens: int = 8, seed: int = 1
) -> list[Answer]:
    """Have that many clients send requests for random models, one after another; return all answers."""
    choose = random.Random(seed)
    waiting = [(choose.choice(models), choose.random() < 0.5) for _ in range(requests)]
    answers: list[Answer] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def client() -> None:
            while waiting:
                model, is_stream = waiting.pop()
                answers.append(await ask(session, url, model, is_stream=is_stream, tokens=tokens))

        await asyncio.gather(*(client() for _ in range(clients)))
    return answers
