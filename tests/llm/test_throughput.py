"""Tokens per second through dynaplan beside those of the same engine asked directly. Printed, not judged."""

from __future__ import annotations

import asyncio
import json
import time
from statistics import median

import aiohttp
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import WORKER, engine_of, model_of

ROUNDS = 7
TOKENS = {1: 120, 4: 50}
"""Of each answer, by the number of streams."""
MESSAGES = [{"role": "user", "content": "Write a long story about the lights of a city."}]


async def tokens_per_s(url: str, headers: dict[str, str], model: str, streams: int) -> float:
    """Tokens of all streams together, by the wall clock."""
    connector = aiohttp.TCPConnector(force_close=True)  # as llama.cpp wants it
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        started_s = time.perf_counter()
        tokens = await asyncio.gather(*(stream(session, url, model, TOKENS[streams]) for _ in range(streams)))
        return sum(tokens) / (time.perf_counter() - started_s)


async def stream(session: aiohttp.ClientSession, url: str, model: str, tokens: int) -> int:
    body = {
        "model": model,
        "messages": MESSAGES,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    assert lines[-1] == "data: [DONE]" or lines[-2] == "data: [DONE]"
    usage = [
        json.loads(line[5:])["usage"] for line in lines if line.startswith("data: {") and "usage" in line
    ]
    assert usage[-1]["completion_tokens"] == tokens
    return tokens


@pytest.mark.parametrize("streams", [1, 4])
async def test_tokens_per_second_beside_the_engine_alone(
    one_pool: Deployment, streams: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(one_pool)
    engine_url, token = await engine_of(one_pool, WORKER)
    key = {"Authorization": f"Bearer {token}"}
    alone, through = [], []
    for _ in range(ROUNDS):
        alone.append(await tokens_per_s(engine_url, key, model, streams))
        through.append(await tokens_per_s(one_pool.url, {}, model, streams))
    # The first round warms caches and connections up.
    ratios = [behind / direct for direct, behind in zip(alone[1:], through[1:], strict=True)]
    with capsys.disabled():
        print(
            f"\n{streams} streams: engine alone {median(alone[1:]):.1f} tokens/s, "
            f"through dynaplan {median(through[1:]):.1f} tokens/s, ratio of a round {median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f}; aim 0.97)"
        )
