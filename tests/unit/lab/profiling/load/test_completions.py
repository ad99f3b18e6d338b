"""One streamed completion, against servers that end their streams as the engines do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from aiohttp import web

from dynaplan.engines.timing_model.tokens import count_tokens
from dynaplan.lab.profiling.load.completions import (
    Answer,
    CompletionClient,
    RequestFailed,
    open_client,
    served_model,
)
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.util.errors import DeploymentError

USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def event(text: str | None = None, reason: str | None = None, **more: Any) -> bytes:
    """One event; without a text it has no choice."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": reason}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
LIKE_VLLM = [event("a"), event("b"), event("c", "length"), event(usage=USAGE), DONE]
LIKE_LLAMACPP = [event("a"), event("b"), event("c"), event("", "length", usage=USAGE), DONE]


class Server:
    """Answers every completion with the same pieces, as they were told; keeps the bodies."""

    def __init__(self) -> None:
        self.pieces: Sequence[bytes] = LIKE_VLLM
        self.status = 200
        self.bodies: list[dict[str, Any]] = []
        self.models = '{"data": [{"id": "m"}]}'

    async def list_models(self, request: web.Request) -> web.Response:
        return web.Response(status=self.status, text=self.models)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
        return response


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    handler = Server()
    application = web.Application()
    application.router.add_post("/v1/completions", handler.answer)
    application.router.add_get("/v1/models", handler.list_models)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield handler, f"http://{host}:{port}"
    await runner.cleanup()


async def ask(server: tuple[Server, str], *pieces: bytes, is_text: bool = False) -> Answer:
    handler, url = server
    handler.pieces = pieces or handler.pieces
    async with open_client() as http:
        prompt = PromptPool(is_text=is_text).numbered(0, 7)
        return await CompletionClient(http, url, "m").complete(prompt, 3)


@pytest.mark.parametrize("pieces", [LIKE_VLLM, LIKE_LLAMACPP])
async def test_only_what_brings_tokens_is_counted(
    server: tuple[Server, str], pieces: Sequence[bytes]
) -> None:
    answer = await ask(server, *pieces)
    assert len(answer.event_times_s) == 3
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (7, 3, 4)
    assert answer.ttft_ms > 0.0


async def test_events_may_come_in_any_pieces(server: tuple[Server, str]) -> None:
    whole = b"".join(LIKE_VLLM)
    answer = await ask(server, *(whole[start : start + 11] for start in range(0, len(whole), 11)))
    assert len(answer.event_times_s) == 3


async def test_several_tokens_in_one_event_are_several_tokens(server: tuple[Server, str]) -> None:
    answer = await ask(server, event("abc", "length"), event(usage=USAGE), DONE)
    assert answer.tokens_per_event == 3.0


async def test_the_request_asks_for_exactly_so_many_tokens(server: tuple[Server, str]) -> None:
    await ask(server)
    body = server[0].bodies[0]
    assert len(body["prompt"]) == 7
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (3, 3, True)
    assert (body["model"], body["stream"], body["stream_options"]) == ("m", True, {"include_usage": True})


async def test_a_prompt_is_primed_with_one_token_that_is_not_streamed(server: tuple[Server, str]) -> None:
    async with open_client() as http:
        await CompletionClient(http, server[1], "m").prime(PromptPool(is_text=False).numbered(0, 7))
    body = server[0].bodies[0]
    assert (body["max_tokens"], body["stream"], "stream_options" in body) == (1, False, False)


async def test_the_simulated_engine_gets_a_text_of_as_many_tokens(server: tuple[Server, str]) -> None:
    await ask(server, is_text=True)
    assert count_tokens(server[0].bodies[0]["prompt"]) == 7


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([event("a"), event("b")], "no end"),
        ([event("a"), b'data: {"error": {"message": "out of memory"}}\n\n', DONE], "out of memory"),
    ],
)
async def test_an_answer_that_breaks_off_is_a_failure(
    server: tuple[Server, str], pieces: Sequence[bytes], why: str
) -> None:
    with pytest.raises(RequestFailed, match=why):
        await ask(server, *pieces)


async def test_a_refusal_is_reported_with_its_reason(server: tuple[Server, str]) -> None:
    server[0].status = 400
    with pytest.raises(RequestFailed, match="400: no such thing"):
        await ask(server, b"no such thing")


async def test_the_model_that_is_asked_is_the_first_that_the_service_names(
    server: tuple[Server, str],
) -> None:
    async with open_client() as http:
        assert await served_model(http, server[1]) == "m"


@pytest.mark.parametrize(
    ("status", "models", "said"),
    [
        (401, "no key", "answers 401: no key"),
        (200, "[]", "is no list of models"),
        (200, '{"data": []}', "serves no model yet"),
    ],
)
async def test_a_service_without_a_model_is_told_in_words(
    server: tuple[Server, str], status: int, models: str, said: str
) -> None:
    handler, url = server
    handler.status, handler.models = status, models
    async with open_client() as http:
        with pytest.raises(DeploymentError, match=said):
            await served_model(http, url)


async def test_a_service_that_is_not_there_is_told_in_words() -> None:
    async with open_client() as http:
        with pytest.raises(DeploymentError, match="does not answer"):
            await served_model(http, "http://127.0.0.1:9")
