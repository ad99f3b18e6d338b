"""vLLM behind dynaplan: the planner follows its signals, its streams are drained, its death is noticed."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from dynaplan.engines.registry import engine_kind
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.gateway.migration import make_continuation
from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, parse_call
from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import WORKER, chunks_of, is_ready, model_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually
from tests.vllm.conftest import KV_BLOCKS, START_UP_S, shared_memory

PLANNER = (
    "--Planner.adjustment-interval=6",
    "--Planner.metric-pulling-interval=1",
    "--Planner.decode-kv-scale-up-threshold=0.6",
    "--Planner.decode-kv-scale-down-threshold=0.3",
    "--Planner.max-gpu-budget=2",
)


@pytest.fixture(scope="module")
def one_pool(deploy_vllm: Callable[..., Deployment]) -> Deployment:
    return deploy_vllm("graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), *PLANNER)


def fetch(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return str(response.read().decode())


def load_of(deployment: Deployment, worker: str) -> WorkerLoad:
    url = deployment.workers()[worker]["url"]
    token = deployment.clients_environment()["DYNAPLAN_WORKER_TOKEN"]
    return WorkerLoad.from_json(json.loads(fetch(f"{url}/load_metrics", token)))


async def test_the_planner_follows_the_real_kv_pressure_up_and_down_and_no_stream_is_lost(
    one_pool: Deployment,
) -> None:
    deployment = one_pool
    seen: list[WorkerLoad] = []

    def is_pressed() -> bool:
        seen.append(load_of(deployment, WORKER))
        return seen[-1].kv_usage > 0.7 and seen[-1].waiting_requests > 0

    async with Load(deployment.url, model_of(deployment), clients=24, tokens=400) as load:
        await eventually(is_pressed, 60, 0.2)
        assert seen[-1].kv_total_blocks == KV_BLOCKS
        assert seen[-1].kv_active_blocks > 0.6 * KV_BLOCKS
        assert seen[-1].running_requests > 0
        await eventually(lambda: len(deployment.workers("VllmWorker")) == 2, 60)
        await load.stop()
    assert load.incomplete == []
    async with Load(deployment.url, model_of(deployment), clients=8, tokens=100, prompt="short") as load:
        await eventually(lambda: is_ready(deployment, "VllmWorker", 2), START_UP_S)
        await eventually(lambda: is_ready(deployment, "VllmWorker", 1), 120)
        await load.stop()
    assert len(load.outcomes) >= 8
    assert load.incomplete == []
    assert "decode" in deployment.run("why", "-n", "50").stdout


async def test_a_killed_engine_takes_its_worker_out_and_comes_back_and_leaves_no_memory(
    one_pool: Deployment,
) -> None:
    in_memory = shared_memory(one_pool)
    (worker,) = one_pool.workers("VllmWorker")
    pid = one_pool.pid_of(worker)
    (engine,) = [child for child in psutil.Process(pid).children(recursive=True) if is_engine_core(child)]
    assert in_memory
    engine.kill()
    await eventually(lambda: one_pool.workers()[worker]["state"] != "ready", 20)
    await eventually(lambda: one_pool.workers()[worker]["state"] == "ready", START_UP_S)
    assert one_pool.pid_of(worker) != pid
    async with Load(one_pool.url, model_of(one_pool), clients=2, tokens=8) as load:
        await eventually(lambda: len(load.outcomes) > 2, 60)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: not any(path.exists() for path in in_memory), 10)


TOKENS, BEGUN = 40, 15
"""Tokens of a whole answer, and of the part of it that a worker has sent when it dies."""


def test_vllm_goes_on_with_an_answer_that_another_worker_has_begun(one_pool: Deployment) -> None:
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    asked = {"model": model_of(one_pool), "messages": messages, "stream": True, "temperature": 0}
    asked |= {"max_tokens": TOKENS, "ignore_eos": True, "stream_options": {"include_usage": True}}
    pieces, prompt_tokens = answered(one_pool, asked)
    begun = "".join(pieces[:BEGUN])
    call = parse_call(CHAT_COMPLETIONS, json.dumps(asked).encode())
    rest = make_continuation(call, begun, BEGUN, engine_kind("vllm").api)
    more, continued_tokens = answered(one_pool, dict(rest.call.document))
    assert len(more) >= TOKENS - BEGUN
    # The beginning is the end of the prompt, and no message that has ended: not a mark of the template more.
    sent_tokens = continued_tokens - prompt_tokens
    assert 0 < sent_tokens <= len(begun.rstrip().encode())


def answered(deployment: Deployment, asked: dict[str, Any]) -> tuple[list[str], int]:
    """The texts of a streamed answer's events, and the tokens of its prompt."""
    asked = {name: value for name, value in asked.items() if name not in ("model", "stream")}
    events = [each for each in chunks_of(deployment, "/v1/chat/completions", **asked) if each != "[DONE]"]
    texts = [each["choices"][0]["delta"].get("content") or "" for each in events if each["choices"]]
    return [text for text in texts if text], events[-1]["usage"]["prompt_tokens"]


def is_engine_core(process: psutil.Process) -> bool:
    return "EngineCore" in " ".join(process.cmdline())
