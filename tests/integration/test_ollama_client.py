"""The real client of Ollama's API against a frontend, whose worker answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("ollama", reason="pip install ollama")

import ollama

from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.contract.model_keys import MODEL_DEMAND, ModelDemand, ModelReport, demand_in
from dynaplan.contract.store_keys import fleet_key
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL
from tests.fakes.polling import eventually

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


async def test_a_request_for_no_embeddings_has_none() -> None:
    async with asked() as (here, client):
        assert (await client.embed(MODEL, [])).embeddings == []
        assert (await client.embeddings(MODEL, "")).embedding == []
        assert here.workers[0].bodies == []


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


# Models that are loaded on request


@asynccontextmanager
async def unloaded(ttl_s: float = 600.0) -> AsyncIterator[tuple[Stage, ollama.AsyncClient]]:
    """A frontend of the model ``ant``, which nobody has loaded yet."""
    model = ServedModel("ant", "VllmWorker", OnDemandSettings(ttl_s=ttl_s))
    async with stage(models=(model,)) as here:
        here.runtime.instance_id = await here.store.grant(60)
        client = ollama.AsyncClient(here.url)
        yield here, client
        await client._client.aclose()


async def demand(here: Stage) -> ModelDemand:
    items = await here.store.list(MODEL_DEMAND.prefix("ns"))
    return demand_in(each.value for each in items).get("ant", ModelDemand())


async def wait_for(here: Stage, **expected: object) -> None:
    async def is_there() -> bool:
        found = await demand(here)
        return all(getattr(found, name) == value for name, value in expected.items())

    await eventually(is_there)


async def test_a_chat_waits_for_its_model_and_says_for_how_long() -> None:
    async with unloaded() as (here, client):
        asked = asyncio.create_task(client.chat("ant", QUESTION))
        await wait_for(here, waiting=1)
        await here.worker()
        answer = await asked
    assert answer.done
    assert 0 < answer.load_duration < answer.total_duration


async def test_a_request_without_a_prompt_waits_until_its_model_is_loaded() -> None:
    async with unloaded() as (here, client):
        asked = asyncio.create_task(client.generate("ant"))
        await wait_for(here, waiting=1)
        await here.worker()
        assert (await asked).done_reason == "load"
        await wait_for(here, waiting=0, in_flight=0)


async def test_a_keep_alive_is_a_lease_after_the_last_request_and_no_longer_than_the_ttl() -> None:
    async with unloaded(ttl_s=600.0) as (here, client):
        await here.worker()
        await client.chat("ant", QUESTION, keep_alive="1m")
        await wait_for(here, keep_alive_s=60.0)
        await client.chat("ant", QUESTION, keep_alive=-1)
        await wait_for(here, keep_alive_s=None)
        await client.chat("ant", QUESTION, keep_alive="2m")
        await wait_for(here, keep_alive_s=120.0)
        await here.post(model="ant")
        await wait_for(here, keep_alive_s=None)


async def test_a_keep_alive_of_0_without_a_prompt_lets_the_model_leave_and_loads_nothing() -> None:
    async with unloaded() as (here, client):
        answer = await client.generate("ant", keep_alive=0)
        await wait_for(here, keep_alive_s=0.0, waiting=0)
    assert answer.done_reason == "unload"


async def test_a_loaded_model_is_listed_with_its_memory_and_the_moment_at_which_it_leaves() -> None:
    async with unloaded() as (here, client):
        assert (await client.ps()).models == []
        await here.worker()
        report = ModelReport("VllmWorker", "ready", memory_bytes=5_000, gpus=(0,), leaves_unix_s=4e9)
        await here.store.put(fleet_key("ns"), json.dumps({"roles": {}, "models": {"ant": report.to_json()}}))

        async def is_told() -> bool:
            return any(each.size_vram == 5_000 for each in (await client.ps()).models)

        await eventually(is_told)
        (loaded,) = (await client.ps()).models
        assert loaded.expires_at is not None
        assert loaded.expires_at.timestamp() == 4e9
        assert [each.model for each in (await client.list()).models] == ["ant:latest"]
