"""How much of its prompts real vLLM finds cached: requests in turn, and where their prefix is."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import model_of
from tests.vllm.conftest import BLOCK_TOKENS

CONVERSATIONS, TURNS = 12, 5
PREFIX_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 10 * BLOCK_TOKENS, 20, 4
"""All prefixes together take 120 blocks of 100 that a worker has: they fit into all, not into one."""

WORKERS = 3
OPTIONS = (
    f"--VllmWorker.ServiceArgs.workers={WORKERS}",
    "--VllmWorker.enable-prompt-tokens-details=true",
    "--Planner.no-operation=true",
)


async def hit_rate(deployment: Deployment) -> float:
    """The part of the prompts' tokens that the engines state as ``cached_tokens``."""
    dice = random.Random(5)
    prefixes = [[dice.randrange(20, 250) for _ in range(PREFIX_TOKENS)] for _ in range(CONVERSATIONS)]
    order = list(range(CONVERSATIONS)) * TURNS
    dice.shuffle(order)
    asked = cached = 0
    async with aiohttp.ClientSession() as session:
        for conversation in order:
            question = [dice.randrange(20, 250) for _ in range(QUESTION_TOKENS)]
            body: dict[str, Any] = {
                "model": model_of(deployment),
                "prompt": prefixes[conversation] + question,
            }
            body |= {"max_tokens": ANSWER_TOKENS, "ignore_eos": True}
            async with session.post(f"{deployment.url}/v1/completions", json=body) as response:
                answer = await response.json()
                assert response.status == 200, answer
            usage = answer["usage"]
            asked += usage["prompt_tokens"]
            cached += (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return cached / asked


@pytest.mark.timeout(3000)
async def test_routing_by_prefixes_finds_more_of_them_cached_than_routing_in_turn(
    deploy_vllm: Callable[..., Deployment],
) -> None:
    rates = {}
    for router in ("round-robin", "kv"):
        begun_s = time.monotonic()
        options = (*OPTIONS, f"--Processor.router={router}")
        deployment = deploy_vllm("graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), *options)
        ready_s = time.monotonic() - begun_s
        rates[router] = await hit_rate(deployment)
        print(f"{router}: {rates[router]:.1%} cached; {WORKERS} workers ready after {ready_s:.0f} s")
    best = (TURNS - 1) / TURNS * PREFIX_TOKENS / (PREFIX_TOKENS + QUESTION_TOKENS)
    print(f"at most {best:.1%} could be")
    assert rates["round-robin"] < rates["kv"] <= best
