"""A stream goes on at another worker when its own dies, as the client sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.polling import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTINUES = {"engine": "sim"}
WHOLE = "t0 t1 t2 t3 t4 "


async def streamed(here: Stage, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream that ends with ``[DONE]``."""
    status, text = await here.post(path, stream=True, **fields)
    assert status == 200
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for each in events for choice in each["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


async def cut(here: Stage, path: str = CHAT, **fields: Any) -> str:
    """What a client gets of a stream that ends in the middle."""
    received = b""
    with pytest.raises(aiohttp.ClientPayloadError):
        async with here.client.post(here.url + path, json=body(path, stream=True, **fields)) as response:
            async for chunk in response.content.iter_any():
                received += chunk
    return received.decode()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("act", ["die_within", "stop_within"])
async def test_a_stream_whose_worker_dies_goes_on_at_another(act: str, path: str) -> None:
    async with stage() as here:
        bad, good = await here.worker(act, CONTINUES), await here.worker(card=CONTINUES)
        events = await streamed(here, path, stream_options={"include_usage": True})
        assert await here.sample("dynamo_frontend_model_migration_total{") == 1
        assert 'status="success"' in (await here.get("/metrics"))[1]
    assert text_of(events) == WHOLE
    assert len({(each["id"], each["created"]) for each in events if text_of([each])}) == 1
    assert sum("role" in choice.get("delta", {}) for each in events for choice in each["choices"]) <= 1
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert (len(bad.bodies), len(good.bodies)) == (1, 1)


async def test_a_stream_that_its_worker_aborts_as_it_ends_goes_on_at_another() -> None:
    async with stage() as here:
        bad, _ = await here.worker("abort_within", CONTINUES), await here.worker(card=CONTINUES)
        received = b""
        async with here.client.post(here.url + CHAT, json=body(CHAT, stream=True)) as response:
            async for chunk in response.content.iter_any():
                received += chunk
                bad.go_on.set()  # only now: an answer that is aborted before it has begun is begun anew
        assert await here.sample("dynamo_frontend_model_migration_total{") == 1
    assert b'"abort"' not in received
    assert received.endswith(b"data: [DONE]\n\n")
    events = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
    assert text_of(events) == WHOLE


async def test_the_limit_of_tokens_is_that_of_the_whole_answer() -> None:
    async with stage() as here:
        await here.worker("die_within", CONTINUES)
        good = await here.worker(card=CONTINUES)
        await streamed(here, max_tokens=5)
    assert good.bodies[0]["max_tokens"] == 4  # 3, and one more for the white space of "t1 "
    assert good.bodies[0]["messages"][-1] == {"role": "assistant", "content": "t0 t1"}


async def test_a_stream_migrates_more_than_once_up_to_the_limit() -> None:
    async with stage(migration_limit=2) as here:
        for _ in range(2):
            await here.worker("die_within", CONTINUES)
        await here.worker(card=CONTINUES)
        assert text_of(await streamed(here)) == WHOLE
    async with stage(migration_limit=1) as here:
        for _ in range(3):
            await here.worker("die_within", CONTINUES, tokens=9)
        text = await cut(here)
        assert "it has migrated 1 times" in text
        assert "t3" in text
        assert "t4" not in text


@pytest.mark.parametrize(
    ("options", "fields", "words"),
    [
        ({"migration_limit": 0}, {}, "does not migrate"),
        ({}, {"seed": 5}, "does not migrate"),
        ({}, {"n": 2}, "does not migrate"),
        ({}, {"logprobs": True}, "log probabilities cannot be put together at white space"),
    ],
)
async def test_a_stream_that_may_not_migrate_is_cut_with_the_reason(
    options: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    async with stage(**options) as here:
        bad, good = await here.worker("die_within", CONTINUES), await here.worker(card=CONTINUES)
        assert words in await cut(here, **fields)
    assert (len(bad.bodies), len(good.bodies)) == (1, 0)


async def test_a_stream_that_finds_no_other_worker_in_time_is_cut() -> None:
    async with stage(worker_wait=0.1) as here:
        worker = await here.worker("abort_within", CONTINUES)
        client = asyncio.create_task(cut(here))
        await eventually(lambda: worker.in_flight == 1)
        await here.leave(worker)
        worker.go_on.set()
        text = await client
    assert "t1 " in text
    assert '"no_worker"' in text


async def test_a_worker_that_will_not_go_on_ends_the_stream_with_its_words() -> None:
    async with stage() as here:
        await here.worker("die_within", CONTINUES)
        await here.worker("refuse", CONTINUES)
        text = await cut(here)
    assert "did not go on with the answer (400)" in text


async def test_a_second_death_before_the_next_token_is_tried_elsewhere() -> None:
    async with stage() as here:
        await here.worker("die_within", CONTINUES)
        await here.worker("die_at_role", CONTINUES)
        await here.worker(card=CONTINUES)
        assert text_of(await streamed(here)) == WHOLE


@pytest.mark.parametrize(("act", "words"), [("die_at_role", "3 workers died"), ("error_500", "(500)")])
async def test_a_stream_ends_when_no_worker_that_is_asked_for_the_rest_brings_a_token(
    act: str, words: str
) -> None:
    async with stage() as here:
        first = await here.worker("abort_within", CONTINUES)
        client = asyncio.create_task(cut(here))
        await eventually(lambda: first.in_flight == 1)
        others = [await here.worker(act, CONTINUES) for _ in range(2)]
        await here.leave(first)
        first.go_on.set()
        async with asyncio.timeout(10):
            assert words in await client
    assert sum(len(each.bodies) for each in others) <= 3


async def test_nothing_of_a_migrated_stream_stays_booked() -> None:
    async with stage() as here:
        await here.worker("die_within", CONTINUES)
        await here.worker(card=CONTINUES)
        await streamed(here)
        await eventually(lambda: all(not worker.in_flight for worker in here.workers))
        assert await here.sample("dynamo_frontend_inflight_requests{") == 0
