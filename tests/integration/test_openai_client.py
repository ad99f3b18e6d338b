"""The real ``openai`` client, synchronous and asynchronous, at a frontend before a simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("openai", reason="pip install openai")

import openai

from tests.contract.engine_workers import Worker, starting
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL, TOKEN
from tests.fakes.polling import eventually

ASKED: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
WORDS = "This is dynaplan's simulated engine"


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Stage]:
    async with starting(tmp_path, TOKEN) as start, stage() as served:
        await serve(served, await start("sim", {"speedup-ratio": 0, "model": MODEL}))
        yield served


async def serve(here: Stage, engine: Worker) -> None:
    """Have the frontend send its requests to that engine."""
    worker = await here.worker(card=engine.engine.card())
    worker.engine_url = engine.url
    instance = await worker.register(here.store, 1)
    await eventually(lambda: instance in here.discovery.all())


@pytest.fixture
async def client(here: Stage) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_chats_and_completions(client: Any) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=ASKED, max_tokens=20)
    assert answer.choices[0].message.content.startswith(WORDS)
    assert answer.usage.completion_tokens == 20
    stream = await client.chat.completions.create(
        model=MODEL, messages=ASKED, max_tokens=9, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert len(chunks) == 10
    assert chunks[-1].usage.completion_tokens == 9
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 400_000}}
    shown = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}]
    answer = await client.chat.completions.create(model=MODEL, messages=shown, max_tokens=5)
    assert answer.usage.prompt_tokens < 40


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_list_of_prompts_is_answered_prompt_by_prompt(client: Any, is_stream: bool) -> None:
    prompts = ["One is", "Two are", "Three are"]
    asked = {"model": MODEL, "max_tokens": 30}
    alone = [(await client.completions.create(prompt=each, **asked)).choices[0].text for each in prompts]
    together = await client.completions.create(prompt=prompts, stream=is_stream, **asked)
    if is_stream:
        texts = ["", "", ""]
        async for chunk in together:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        assert together.usage.completion_tokens == 90
        assert [choice.index for choice in together.choices] == [0, 1, 2]
        texts = [choice.text for choice in together.choices]
    assert texts == alone


async def test_embeddings_are_the_same_for_the_same_text_in_each_form(client: Any) -> None:
    answer = await client.embeddings.create(model=MODEL, input=["blue", "sky", "blue"])
    first, second, third = (each.embedding for each in answer.data)  # the client asks for base64
    assert len(first) == 64
    assert first == third != second
    assert answer.usage.prompt_tokens == 3
    plain = await client.embeddings.create(model=MODEL, input="blue", encoding_format="float")
    assert plain.data[0].embedding == pytest.approx(first, abs=1e-6)
    short = await client.embeddings.create(model=MODEL, input="blue", dimensions=8)
    assert len(short.data[0].embedding) == 8


async def test_responses_are_given_whole_and_as_streams_of_named_events(here: Stage, client: Any) -> None:
    answer = await client.responses.create(model=MODEL, input="Why?", instructions="Be short.")
    assert answer.output_text.startswith(WORDS)
    assert answer.status == "completed"
    assert answer.usage.output_tokens > 0
    stream = await client.responses.create(model=MODEL, input=ASKED, max_output_tokens=12, stream=True)
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    assert [event.type for event in events].count("response.output_text.delta") == 12
    assert events[-1].response.incomplete_details.reason == "max_output_tokens"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == text
    name = 'dynamo_frontend_requests_total{dynamo_namespace="ns",endpoint="responses"'
    assert await here.sample(name) == 2
    assert await here.sample("dynamo_frontend_time_to_first_token_seconds_count") == 1


async def test_models_are_listed_and_found_by_their_names(client: Any) -> None:
    assert [model.id async for model in await client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "dynaplan"
    with pytest.raises(openai.NotFoundError, match="Known: sim-8b"):
        await client.models.retrieve("gpt-6")


async def test_llamacpp_has_most_of_the_paths(tmp_path: Path, tiny_gguf: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    options = {"model": str(tiny_gguf), "embedding": True, "pooling": "mean", "threads": 1, "threads-http": 8}
    async with starting(tmp_path, TOKEN) as start, stage() as here:
        await serve(here, await start("llamacpp", options))
        async with openai.AsyncOpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.embeddings.create(model="tiny", input=["blue", "sky"])
            assert [len(each.embedding) for each in answer.data] == [128, 128]
            stream = await client.responses.create(
                model="tiny", input="Why?", max_output_tokens=6, stream=True, temperature=0
            )
            events = [event async for event in stream]
            assert [event.type for event in events].count("response.output_text.delta") == 6
            assert events[-1].type == "response.completed"
            asked: dict[str, Any] = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 3}
            assert len((await client.completions.create(**asked)).choices) == 2
            with pytest.raises(openai.BadRequestError, match="does not stream the answers to a list"):
                await client.completions.create(**asked, stream=True)
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            with pytest.raises(openai.BadRequestError, match="takes no such images"):
                await client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": [image]}]
                )
            assert await here.sample("dynamo_frontend_output_sequence_tokens_sum") >= 6


async def test_what_the_engine_lacks_is_an_error_of_the_client(here: Stage, client: Any) -> None:
    async with here.client.post(f"{here.url}/v1/rerank", json={"model": MODEL, "query": "x"}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_url"
    with pytest.raises(openai.InternalServerError, match="No engine here makes images") as caught:
        await client.images.generate(model=MODEL, prompt="a cat")  # not tried again, for its header
    assert caught.value.status_code == 501
    with pytest.raises(openai.BadRequestError, match="would be fetched by the engine"):
        image = {"type": "input_image", "detail": "auto", "image_url": "http://169.254.169.254/"}
        await client.responses.create(model=MODEL, input=[{"role": "user", "content": [image]}])


async def test_texts_are_cut_into_tokens_and_put_together_again(here: Stage) -> None:
    async def asked(path: str, **body: Any) -> Any:
        async with here.client.post(here.url + path, json={"model": MODEL, **body}) as response:
            return await response.json()

    tokens = (await asked("/tokenize", prompt="a blue sky"))["tokens"]
    assert len(tokens) == 3
    assert await asked("/detokenize", tokens=tokens) == {"prompt": "a blue sky"}


async def test_the_synchronous_client_gets_the_same(here: Stage) -> None:
    def asked() -> tuple[str, str, int, str, list[str]]:
        with openai.OpenAI(base_url=f"{here.url}/v1", api_key="none", max_retries=0) as client:
            asking: dict[str, Any] = {"model": MODEL, "messages": ASKED, "max_tokens": 20}
            whole = client.chat.completions.create(**asking).choices[0].message.content
            chunks = client.chat.completions.create(**asking, stream=True)
            streamed = "".join(chunk.choices[0].delta.content for chunk in chunks)
            vectors = client.embeddings.create(model=MODEL, input=["a", "b"]).data
            response = client.responses.create(model=MODEL, input=ASKED).output_text
            return whole, streamed, len(vectors), response, [each.id for each in client.models.list()]

    whole, streamed, vectors, response, models = await asyncio.to_thread(asked)
    assert whole == streamed
    assert whole.startswith(WORDS)
    assert response.startswith(WORDS)
    assert (vectors, models) == (2, [MODEL])
