"""The real client of Ollama's API against a frontend, whose worker answers as vLLM does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("ollama", reason="pip install ollama")

import ollama

from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL

QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


@asynccontextmanager
async def asked(act: str = "answer", **options: object) -> AsyncIterator[tuple[Stage, ollama.AsyncClient]]:
    async with stage(**options) as here:
        await here.worker(act)
        client = ollama.AsyncClient(here.url)
        yield here, client
        await client._client.aclose()


async def test_a_chat_is_answered_whole_with_counts_and_durations() -> None:
    async with asked() as (here, client):
        answer = await client.chat(MODEL, QUESTION, options={"num_predict": 5}, keep_alive="5m")
    assert answer.message.content
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 5)
    assert answer.total_duration >= answer.eval_duration >= 0
    assert here.workers[0].bodies[0]["max_tokens"] == 5


async def test_a_chat_is_streamed_as_lines_and_its_text_is_that_of_the_whole_answer() -> None:
    async with asked() as (_, client):
        whole = await client.chat(MODEL, QUESTION)
        parts = [part async for part in await client.chat(MODEL, QUESTION, stream=True)]
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * 5 + [True]
    assert parts[-1].eval_count == 5


async def test_a_prompt_is_answered_with_a_template_and_without() -> None:
    async with asked() as (here, client):
        chatted = await client.generate(MODEL, "The sky is", system="Be brief.")
        raw = await client.generate(MODEL, "The sky is", raw=True)
        parts = [part async for part in await client.generate(MODEL, "The sky is", stream=True)]
    assert chatted.response and raw.response
    assert "".join(part.response or "" for part in parts) == chatted.response
    assert [list(body.keys() & {"messages", "prompt"}) for body in here.workers[0].bodies] == [
        ["messages"],
        ["prompt"],
        ["messages"],
    ]


async def test_models_are_listed_and_shown_under_the_tag_that_clients_expect() -> None:
    async with asked() as (_, client):
        (listed,) = (await client.list()).models
        (loaded,) = (await client.ps()).models
        shown = await client.show(f"{MODEL}:latest")
        answer = await client.chat(f"{MODEL}:latest", QUESTION)
    assert listed.model == loaded.model == f"{MODEL}:latest"
    assert loaded.context_length == 8192
    assert shown.capabilities == ["completion"]
    assert answer.done


async def test_a_request_without_a_prompt_is_a_load() -> None:
    async with asked() as (here, client):
        answer = await client.generate(MODEL, "", keep_alive=-1)
    assert (answer.done, answer.done_reason, answer.response) == (True, "load", "")
    assert here.workers[0].bodies == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_unknown_model_is_an_error_that_the_client_raises(is_stream: bool) -> None:
    async with asked() as (_, client):
        with pytest.raises(ollama.ResponseError, match="nobody") as raised:
            answer = await client.chat("nobody", QUESTION, stream=is_stream)
            async for _part in answer:
                pass
    assert raised.value.status_code == 404


async def test_a_failure_within_a_stream_is_raised_by_the_client() -> None:
    async with asked("error_within") as (here, client):
        here.workers[0].go_on.set()
        with pytest.raises(ollama.ResponseError):
            async for _part in await client.chat(MODEL, QUESTION, stream=True):
                pass


async def test_what_is_not_offered_is_a_501_with_a_sentence() -> None:
    async with asked() as (_, client):
        with pytest.raises(ollama.ResponseError, match="declared below Models") as raised:
            await client.create("mine", from_="other")
    assert raised.value.status_code == 501


async def test_a_keep_alive_that_is_none_is_a_400() -> None:
    async with asked() as (_, client):
        with pytest.raises(ollama.ResponseError, match="keep_alive is 'soon'") as raised:
            await client.chat(MODEL, QUESTION, keep_alive="soon")
    assert raised.value.status_code == 400


@pytest.mark.parametrize("body", [b"no JSON", b"[]"])
async def test_a_body_that_is_no_object_is_a_400_in_ollamas_form(body: bytes) -> None:
    async with asked() as (here, _), here.client.post(f"{here.url}/api/chat", data=body) as response:
        document = await response.json()
    assert response.status == 400
    assert document.keys() == {"error"}


async def test_all_but_the_version_is_behind_the_key() -> None:
    async with asked(api_key="sk-1") as (here, client):
        with pytest.raises(ollama.ResponseError) as raised:
            await client.list()
        status, text = await here.get("/api/version")
        known = ollama.AsyncClient(here.url, headers={"Authorization": "Bearer sk-1"})
        answer = await known.chat(MODEL, QUESTION)
        await known._client.aclose()
    assert raised.value.status_code == 401
    assert (status, '"version"' in text) == (200, True)
    assert answer.done
