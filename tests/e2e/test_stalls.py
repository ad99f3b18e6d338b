"""A worker that is stopped, with requests at it: nobody waits for it where another can answer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_migration import Stream, has_grown, streams_of, the_busy_worker
from tests.fakes.polling import eventually

CHAT = "/v1/chat/completions"
TWO_WORKERS = (
    *("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.startup-time=0.1", "--gpus", "2"),
    *("--Planner.no-operation=true", "--Frontend.migration-stall=1"),
)
LONG_STEPS = (
    *("--VllmWorker.max-model-len=100000", "--VllmWorker.max-num-batched-tokens=100000"),
    "--VllmWorker.enable-prefix-caching=false",
)


@pytest.mark.timeout(240)
async def test_nobody_waits_for_a_worker_that_stands_still(deploy: Callable[..., Deployment]) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *TWO_WORKERS)
    uncut = await streams_of(deployment.url, CHAT)
    victim = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        try:
            first = Stream()
            task = asyncio.create_task(first.take(session, deployment.url, 0, CHAT))
            await eventually(partial(has_grown, first, 0), 60, 0.001)
            victim = await the_busy_worker(session, deployment)
            os.kill(victim, signal.SIGSTOP)
            assert await streams_of(deployment.url, CHAT) == uncut
            await task
            assert first.seen() == uncut[0]
            assert psutil.Process(victim).status() == psutil.STATUS_STOPPED  # and was not replaced meanwhile
        finally:
            os.kill(victim, signal.SIGCONT)
    await eventually(lambda: "answers again" in _log(deployment), 60)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_worker_with_steps_of_seconds_is_not_taken_for_stalled(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *TWO_WORKERS, *LONG_STEPS)
    body = {"model": MODEL, "prompt": list(range(90_000)), "max_tokens": 2, "stream": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        answers = [_whole(session, f"{deployment.url}/v1/completions", body) for _ in range(8)]
        assert all("[DONE]" in each for each in await asyncio.gather(*answers))
    assert "stands still" not in _log(deployment)


def _log(deployment: Deployment) -> str:
    return (deployment.directory / ".dynamo" / "logs" / "dynamo" / "dynamo_Frontend.log").read_text()


async def _whole(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with session.post(url, json=body) as response:
        return await response.text()
