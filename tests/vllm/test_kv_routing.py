"""Two workers with real vLLM: requests go where their prefix is; a killed worker's blocks are forgotten."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.gateway.kv_routing.follower import KvCacheFollower
from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import model_of
from tests.fakes.kv_index_of import kv_index_of
from tests.fakes.polling import eventually
from tests.vllm.conftest import BLOCK_TOKENS

FIRST = list(range(20, 220))
"""The token ids of a conversation's first question: 6 blocks and a bit."""

PLAIN = ("--Processor.router=kv", "--VllmWorker.ServiceArgs.workers=2", "--Planner.no-operation=true")


@pytest.fixture(scope="module")
def two_workers(deploy_vllm: Callable[..., Deployment]) -> Deployment:
    return deploy_vllm("graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), *PLAIN)


async def asked(deployment: Deployment, prompt: list[int], tokens: int = 40) -> list[int]:
    """The prompt with its answer, as token ids."""
    body = {
        "model": model_of(deployment),
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{deployment.url}/v1/completions", json=body) as response,
    ):
        answer: Any = await response.json()
        assert response.status == 200, answer
        return prompt + answer["choices"][0]["token_ids"]


async def computed(deployment: Deployment) -> dict[str, float]:
    """By worker the prompt tokens that its engine has computed itself."""
    found = {}
    async with aiohttp.ClientSession() as session:
        for name, worker in deployment.workers("VllmWorker").items():
            token = deployment.clients_environment()["DYNAPLAN_WORKER_TOKEN"]
            headers = {"Authorization": f"Bearer {token}"}
            url = await engine_url(deployment, name) or worker["url"]
            async with session.get(f"{url}/metrics", headers=headers) as response:
                text = await response.text()
            found[name] = sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == "vllm:prompt_tokens_by_source_total"
                and sample.labels.get("source") == "local_compute"
            )
    return found


async def engine_url(deployment: Deployment, worker: str) -> str:
    from dynaplan.store import connections
    from dynaplan.store.instances import SERVICES_PREFIX, Instance

    store = connections.connect_store(deployment.clients_environment())
    try:
        instances = [
            Instance.from_json(item.value)
            for item in await store.list(f"{SERVICES_PREFIX}{deployment.namespace}/VllmWorker/")
        ]
    finally:
        await store.close()
    return next((each.engine_url for each in instances if each.worker == worker), "")


def known(index: KvCacheFollower, prompt: list[int]) -> dict[int, int]:
    return index.overlaps(block_hashes(prompt, BLOCK_TOKENS))


async def test_a_conversation_stays_where_it_began_and_a_killed_worker_is_forgotten(
    two_workers: Deployment,
) -> None:
    deployment = two_workers
    async with kv_index_of(deployment) as index:
        await eventually(lambda: len(index.publishing) == 2 and all(map(index.is_current, index.publishing)))
        before = await computed(deployment)
        conversation = await asked(deployment, FIRST)
        # The last token of an answer is computed by nobody.
        blocks = (len(conversation) - 1) // BLOCK_TOKENS
        await eventually(lambda: blocks in known(index, conversation).values())
        (holder,) = known(index, conversation)
        after = await computed(deployment)
        first = {name: after[name] - before[name] for name in after}
        assert sorted(first.values()) == [0, len(FIRST)]

        question = conversation + list(range(30, 80))
        await asked(deployment, question)
        last = await computed(deployment)
        second = {name: last[name] - after[name] for name in last}
        (worker,) = (name for name, tokens in first.items() if tokens)
        assert second == {
            name: len(question) - blocks * BLOCK_TOKENS if name == worker else 0 for name in last
        }

        os.kill(deployment.pid_of(worker), signal.SIGKILL)
        await eventually(lambda: holder not in known(index, conversation))
        assert not index.is_current(holder)
        await asked(deployment, question)
