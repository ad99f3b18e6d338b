"""KV entries that move between two vLLM engines by NIXL."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import MESSAGES, WORKER, ask, engine_of, prefills
from tests.vllm.test_one_pool import fetch


async def test_decode_computes_no_prompt_token_that_a_prefill_worker_has_computed(
    deploy_vllm: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(
        deploy_vllm,
        "graphs.disagg:Frontend",
        "vllm_disagg.yaml",
        ("VllmWorker", "PrefillWorker"),
        "--VllmWorker.max-local-prefill-length=0",
        "--Planner.no-operation=true",
    )
    for _ in range(3):
        status, answer = await asyncio.to_thread(
            ask, deployment, "/v1/chat/completions", messages=MESSAGES, max_tokens=8, ignore_eos=True
        )
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 8
    assert prefills(deployment) == {"remote": 3}
    sources = await prompt_tokens_by_source(deployment, WORKER)
    assert sources["local_compute"] == 0
    assert sources["external_kv_transfer"] > 0


async def prompt_tokens_by_source(deployment: Deployment, worker: str) -> dict[str, float]:
    """Where the engine of that worker had its prompts' tokens from."""
    url, token = await engine_of(deployment, worker)
    lines = (await asyncio.to_thread(fetch, f"{url}/metrics", token)).splitlines()
    counts = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total{")]
    return {line.split('source="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in counts}
