"""vLLM behind dynaplan: its own signals, its drain, and KV entries that move between two engines."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

from dynaplan.domain.load import WorkerLoad
from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import MESSAGES, WORKER, ask, engine_of, is_ready, model_of, prefills
from tests.fakes.load import Load
from tests.fakes.polling import eventually
from tests.vllm.conftest import KV_BLOCKS

PLANNER = (
    "--Planner.adjustment-interval=6",
    "--Planner.metric-pulling-interval=1",
    "--Planner.decode-kv-scale-up-threshold=0.6",
    "--Planner.decode-kv-scale-down-threshold=0.3",
    "--Planner.max-gpu-budget=2",
)


def fetch(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.read().decode())


def load_of(deployment: Deployment, worker: str) -> WorkerLoad:
    import json

    url = deployment.workers()[worker]["url"]
    token = deployment.clients_environment()["DYNAPLAN_WORKER_TOKEN"]
    return WorkerLoad.from_json(json.loads(fetch(f"{url}/load_metrics", token)))


async def test_the_planner_follows_the_real_kv_pressure_up_and_down_and_no_stream_is_lost(
    deploy_vllm: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(
        deploy_vllm, "graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), *PLANNER
    )
    seen: list[WorkerLoad] = []

    def is_pressed() -> bool:
        seen.append(load_of(deployment, WORKER))
        return seen[-1].kv_usage > 0.7 and seen[-1].waiting_requests > 0

    async with Load(deployment.url, model_of(deployment), clients=24, tokens=400) as load:
        await eventually(is_pressed, 60, 0.2)
        assert seen[-1].kv_total_blocks == KV_BLOCKS
        assert seen[-1].kv_active_blocks > 0.6 * KV_BLOCKS
        assert seen[-1].running_requests > 0
        await eventually(lambda: is_ready(deployment, "VllmWorker", 2), 200)
        await load.stop()
    assert load.incomplete == []
    async with Load(deployment.url, model_of(deployment), clients=8, tokens=100, prompt="short") as load:
        await eventually(lambda: is_ready(deployment, "VllmWorker", 1), 120)
        await load.stop()
    assert len(load.outcomes) >= 8
    assert load.incomplete == []
    assert "decode" in deployment.run("why", "-n", "50").stdout


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


async def prompt_tokens_by_source(deployment: Deployment, worker: str) -> dict[str, Any]:
    """Where the engine of that worker had its prompts' tokens from."""
    url, token = await engine_of(deployment, worker)
    lines = (await asyncio.to_thread(fetch, f"{url}/metrics", token)).splitlines()
    counts = [line for line in lines if line.startswith("vllm:prompt_tokens_by_source_total{")]
    return {line.split('source="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in counts}
