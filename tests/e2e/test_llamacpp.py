"""A real engine: llama.cpp with a tiny random model, from ``dynaplan serve`` to the last file."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import (
    MESSAGES,
    aggregated,
    ask,
    chunks_of,
    disaggregated,
    is_ready,
    model_of,
    prefills,
    scratch_files,
)
from tests.e2e.traces import in_torture
from tests.fakes.load import Load, stream_one
from tests.fakes.polling import eventually, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def one_pool(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Iterator[Deployment]:
    with aggregated(tmp_path_factory.mktemp("agg"), tiny_gguf) as deployment:
        yield deployment.start()


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Iterator[Deployment]:
    with disaggregated(tmp_path_factory.mktemp("disagg"), tiny_gguf) as deployment:
        yield deployment.start()


@pytest.mark.parametrize("pools", ["one_pool", "two_pools"])
def test_chat_and_completions_stream_to_their_end(pools: str, request: pytest.FixtureRequest) -> None:
    deployment = request.getfixturevalue(pools)
    usage = {"stream_options": {"include_usage": True}, "max_tokens": 12}
    for events in (
        chunks_of(deployment, CHAT, messages=MESSAGES, **usage),
        chunks_of(deployment, COMPLETIONS, prompt="The capital of France is", **usage),
    ):
        assert events[-1] == "[DONE]"
        assert events[-2]["usage"]["completion_tokens"] == 12
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]]
        assert reasons[-1] == "length"


@pytest.mark.parametrize("pools", ["one_pool", "two_pools"])
def test_a_request_that_the_engine_refuses_is_answered_with_the_engines_status(
    pools: str, request: pytest.FixtureRequest
) -> None:
    deployment = request.getfixturevalue(pools)
    status, answer = ask(deployment, CHAT, messages=MESSAGES, max_tokens=4, grammar="root ::= (")
    assert status == 400, answer
    assert "grammar" in answer["error"]["message"]


@pytest.mark.parametrize("pools", ["one_pool", "two_pools"])
def test_a_request_that_ends_llamacpp_is_refused_and_its_worker_lives(
    pools: str, request: pytest.FixtureRequest
) -> None:
    deployment = request.getfixturevalue(pools)
    workers = {name: worker["pid"] for name, worker in deployment.workers().items()}
    triggers = [{"type": 99, "value": "x"}]
    fields = {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": triggers}
    for deadly in (fields, {"grammar_triggers": triggers}, {"grammar": "root ::= " + "(" * 100_000}):
        status, answer = ask(deployment, COMPLETIONS, prompt="hi", max_tokens=8, **deadly)
        assert (status, answer["error"]["code"]) == (400, "invalid_field"), answer
    status, answer = ask(deployment, COMPLETIONS, prompt="hi", max_tokens=8, grammar='root ::= "a"')
    assert status == 200, answer
    assert answer["choices"][0]["text"] == "a"
    assert {name: worker["pid"] for name, worker in deployment.workers().items()} == workers


def test_a_remote_prefill_leaves_the_decode_worker_one_prompt_token_to_compute(two_pools: Deployment) -> None:
    before = prefills(two_pools).get("remote", 0)
    for number in range(6):
        content = f"{number} " + str(MESSAGES[0]["content"])
        messages = [{"role": "user", "content": content}]
        status, answer = ask(two_pools, CHAT, messages=messages, max_tokens=5)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens"] > 400
        assert answer["timings"]["prompt_n"] <= 1, answer["timings"]
    assert prefills(two_pools)["remote"] == before + 6
    wait_until(lambda: scratch_files(two_pools) == [], 10)


def test_fields_of_a_hand_off_are_not_a_clients_to_send(two_pools: Deployment) -> None:
    field = {"kv_slot_file": {"file": "../secret", "tokens": 3}}
    assert ask(two_pools, CHAT, messages=MESSAGES, max_tokens=2, **field)[0] == 400


async def test_more_streams_than_slots_all_end_and_leave_no_file(two_pools: Deployment) -> None:
    async with Load(two_pools.url, model_of(two_pools), clients=12, tokens=60) as load:
        await eventually(lambda: len(load.outcomes) >= 40, 30)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: scratch_files(two_pools) == [], 10)


async def test_a_client_that_goes_away_frees_its_slot_and_its_files(two_pools: Deployment) -> None:
    url, model = two_pools.url, model_of(two_pools)
    async with aiohttp.ClientSession() as session:

        async def begin_and_leave(number: int) -> None:
            body = {
                "model": model,
                "messages": MESSAGES,
                "stream": True,
                "max_tokens": 1500,
                "user": str(number),
            }
            async with session.post(url + CHAT, json=body) as response:
                async for _ in response.content:
                    response.close()
                    return

        await asyncio.gather(*(begin_and_leave(number) for number in range(10)))
        outcomes = await asyncio.gather(
            *(stream_one(session, url, model, f"{number} after them", 20) for number in range(8))
        )
    assert [outcome for outcome in outcomes if not outcome.is_complete] == []
    await eventually(lambda: scratch_files(two_pools) == [], 10)


@pytest.mark.parametrize(
    ("pools", "most"),
    [pytest.param("one_pool", 3, marks=in_torture), pytest.param("two_pools", 2, marks=pytest.mark.slow)],
)
async def test_decode_workers_come_and_go_under_load_and_nothing_is_lost(
    pools: str, most: int, request: pytest.FixtureRequest
) -> None:
    deployment = request.getfixturevalue(pools)
    async with Load(deployment.url, model_of(deployment), clients=8, tokens=300) as load:
        for count in (most, 1):
            await asyncio.to_thread(deployment.scale, decode=count)
            await eventually(lambda count=count: is_ready(deployment, "VllmWorker", count), 30)
            answered = len(load.outcomes)
            await eventually(lambda answered=answered: len(load.outcomes) > answered + 8, 20)
        await load.stop()
    assert len(load.outcomes) > 16
    assert load.incomplete == []
