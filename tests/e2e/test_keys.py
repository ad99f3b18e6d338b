"""A script and a person, with keys, at a real deployment of two frontends and one engine of few places."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.keys import bearer, write_keys
from tests.fakes.polling import eventually

OPTIONS = (
    *("--VllmWorker.max-num-seqs=8", "--VllmWorker.startup-time=0.1", "--Planner.no-operation=true"),
    *("--Frontend.ServiceArgs.workers=2", "--Frontend.max-waiting-requests=400"),
)
SCRIPT = 200
TOKENS = 60
"""Of each answer: three of a person's are above the share of the work from which on a key is named."""


@pytest.mark.timeout(240)
async def test_a_person_is_answered_before_what_a_script_sent_earlier_and_a_revoked_key_is_out(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    file = write_keys(tmp_path / "keys.yaml", {"script": {}, "person": {"admin": True}})
    options = (*OPTIONS, "--api-keys", str(file))
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *options)
    answered: list[str] = []
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=200), connector=aiohttp.TCPConnector(limit=0)
    ) as session:

        async def ask(name: str, tokens: int) -> int:
            body = {"model": MODEL, "prompt": "Why is the sky blue?", "max_tokens": tokens}
            url = f"{deployment.url}/v1/completions"
            async with session.post(url, json=body, headers=bearer(name)) as response:
                await response.read()
                answered.append(name)
                return response.status

        script = [asyncio.create_task(ask("script", TOKENS)) for _ in range(SCRIPT)]
        await eventually(lambda: len(answered) >= 8, 60)
        for _ in range(3):
            before = len(answered)
            assert await ask("person", TOKENS) == 200
            assert len(answered) - before < SCRIPT / 4  # of some 180 that were there before
        told = await asyncio.to_thread(_why, deployment)
        assert "person's share" in told
        assert "script's share" in told
        assert set(await asyncio.gather(*script)) == {200}
        write_keys(file, {"person": {"admin": True}})

        async def is_out() -> bool:
            return await ask("script", 1) == 401

        await eventually(is_out, 30)
        assert await ask("person", 1) == 200

    async def is_written() -> bool:
        usage = await asyncio.to_thread(deployment.run, "keys", "usage", "--csv")
        rows = [line.split(",") for line in usage.stdout.splitlines()]
        return any(row[1:3] == ["script", MODEL] and int(row[3]) >= SCRIPT for row in rows)

    await eventually(is_written, 30)


def _why(deployment: Deployment) -> str:
    return deployment.run("why").stdout
