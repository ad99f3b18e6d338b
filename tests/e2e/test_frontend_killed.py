"""kill -9 of the frontend with requests at it: those that wait are answered, streams end with a last word."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_migration import Stream
from tests.fakes.polling import eventually

CHAT = "/v1/chat/completions"
EACH = 20


async def whole(session: aiohttp.ClientSession, url: str, number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me story {number}"}]
    body = {"model": MODEL, "max_tokens": 150, "ignore_eos": True, "messages": messages}
    async with session.post(url + CHAT, json=body) as response:
        assert response.status == 200, await response.text()
        return dict(await response.json())


@pytest.mark.timeout(240)
async def test_a_killed_frontend_leaves_nobody_without_an_answer(deploy: Callable[..., Deployment]) -> None:
    deployment = await asyncio.to_thread(
        deploy, "graphs.agg:Frontend", "agg.yaml", "--Planner.no-operation=true"
    )
    url, killed = deployment.url, deployment.pid_of("dynamo_Frontend")
    streams = [Stream() for _ in range(EACH)]
    unlimited = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=120), connector=unlimited
    ) as session:
        begun = [
            asyncio.create_task(each.take(session, url, number, CHAT)) for number, each in enumerate(streams)
        ]
        await eventually(lambda: all(each.text for each in streams), 60)
        waiting = [asyncio.create_task(whole(session, url, number)) for number in range(EACH)]
        await asyncio.sleep(0.1)  # they are at the engine: nothing says so to a client
        os.kill(killed, signal.SIGKILL)
        answers = await asyncio.gather(*waiting)
        await asyncio.gather(*begun)
        assert all(each["usage"]["completion_tokens"] == 150 for each in answers)
        assert all(each.is_done or "Ask again" in str(each.error) for each in streams)
        assert not all(each.is_done for each in streams)
        assert (await whole(session, url, 0))["choices"]
    assert deployment.pid_of("dynamo_Frontend") != killed
