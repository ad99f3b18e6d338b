"""Each API's own form for the same fault, at every place where one arises."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import anthropic
import pytest
from aiohttp import web

from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL, FakeWorker

MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
API_BODIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 9},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": MESSAGES},
    "/api/chat": {"model": MODEL, "messages": MESSAGES, "stream": False},
}
ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
}


class MessagesWorker(FakeWorker):
    """A worker that streams Anthropic's events: as llama-server b10434 writes them, without content blocks.

    Its error event is that of vLLM 0.11; with ``act`` ``die_within`` it dies.
    """

    async def _stream(
        self, request: web.BaseRequest, body: dict[str, Any], is_chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(_event("message_start", {"message": {"usage": {"input_tokens": 7}}}))
        for _ in range(2):
            delta = {"type": "text_delta", "text": "a"}
            await response.write(_event("content_block_delta", {"index": 0, "delta": delta}))
        await self.go_on.wait()
        if self.act == "die_within":
            assert request.transport
            request.transport.close()
        else:
            error = {"type": "internal_error", "message": "cannot go on"}
            await response.write(_event("error", {"error": error}))
        return response


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n".encode()


def check_form(path: str, status: int, text: str) -> str:
    """The message of an error in the form of its API."""
    document = json.loads(text)
    if path.startswith("/api/"):
        assert document.keys() == {"error"}
        return str(document["error"])
    if path.startswith("/v1/messages"):
        assert document.keys() == {"type", "error"}
        assert (document["type"], document["error"]["type"]) == ("error", ANTHROPIC_TYPES[status])
    else:
        assert "message" in document["error"]
    return str(document["error"]["message"])


async def ask(here: Stage, path: str, data: bytes | None = None, **changes: Any) -> tuple[int, str]:
    """Status and message of the error that is the answer."""
    body = data if data is not None else json.dumps({**API_BODIES[path], **changes}).encode()
    async with here.client.post(here.url + path, data=body) as response:
        return response.status, check_form(path, response.status, await response.text())


@pytest.mark.parametrize("path", API_BODIES)
async def test_a_fault_of_the_client_has_the_form_of_its_api(path: str) -> None:
    async with stage(max_body_bytes=1000) as here:
        await here.worker()
        assert (await ask(here, path, b"{"))[0] == 400
        assert (await ask(here, path, b"[]"))[0] == 400
        assert (await ask(here, path, model=""))[0] == 400
        status, message = await ask(here, path, model="sim-9b")
        assert (status, "'sim-8b'?" in message) == (404, True)
        assert (await ask(here, path, model="x" * 1000))[0] == 413
        async with here.client.get(here.url + path) as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            check_form(path, 405, await response.text())
        foreign = {"Origin": "http://localhost:1", "Content-Type": "text/plain"}
        async with here.client.post(here.url + path, data=b"{}", headers=foreign) as response:
            check_form(path, response.status, await response.text())


@pytest.mark.parametrize("path", API_BODIES)
async def test_a_missing_key_has_the_form_of_its_api_and_either_header_brings_it(path: str) -> None:
    async with stage({"DYNAPLAN_API_KEY": "secret"}) as here:
        await here.worker()
        assert (await ask(here, path))[0] == 401
        for header in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            async with here.client.post(here.url + path, json=API_BODIES[path], headers=header) as response:
                assert response.status == 200
        async with here.client.post(
            here.url + path, json=API_BODIES[path], headers={"x-api-key": "wrong"}
        ) as response:
            assert response.status == 401
            check_form(path, 401, await response.text())


@pytest.mark.parametrize("path", API_BODIES)
@pytest.mark.parametrize(("act", "status"), [("refuse", 400), ("error_500", 500), ("die_before", 502)])
async def test_an_engines_error_has_the_form_of_the_api(path: str, act: str, status: int) -> None:
    async with stage() as here:
        await here.worker(act)
        assert (await ask(here, path))[0] == status


@pytest.mark.parametrize("path", API_BODIES)
async def test_a_service_that_cannot_answer_now_says_so_in_the_form_of_the_api(path: str) -> None:
    async with stage(worker_wait=0.01, max_waiting_requests=1) as here:
        await here.worker("drain")
        assert (await ask(here, path))[0] == 503
        here.frontend._path.admission.enter_room()
        assert (await ask(here, path))[0] == 429


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
@pytest.mark.parametrize("act", ["error_within", "die_within"])
async def test_an_error_within_a_stream_has_the_form_of_the_api(path: str, act: str) -> None:
    async with stage(migration_limit=0) as here:
        worker: FakeWorker = MessagesWorker() if path == "/v1/messages" else FakeWorker()
        worker.act = act
        await worker.start()
        here.workers.append(worker)
        await here.know(await worker.register(here.store, 1))
        async with here.client.post(here.url + path, json={**API_BODIES[path], "stream": True}) as response:
            first = await response.content.readany()
            worker.go_on.set()
            text = first.decode() + await until_cut(response.content)
    last = text.strip().rpartition("\n")
    if path == "/v1/messages":
        assert last[0].endswith("\nevent: error")
    assert check_form(path, 502 if act == "die_within" else 500, last[2].removeprefix("data: "))


async def until_cut(stream: Any) -> str:
    text = b""
    try:
        async with asyncio.timeout(10):
            while piece := await stream.readany():
                text += piece
    except Exception as error:
        assert "payload" in str(error)  # the connection is cut: no client takes the answer for a whole one
    return text.decode()


async def test_anthropics_own_client_raises_its_own_errors() -> None:
    async with stage({"DYNAPLAN_API_KEY": "secret"}, migration_limit=0) as here:
        worker = MessagesWorker(act="error_within")
        worker.go_on.set()
        await worker.start()
        here.workers.append(worker)
        await here.know(await worker.register(here.store, 1))
        message: Any = {"max_tokens": 9, "messages": MESSAGES}
        async with anthropic.AsyncAnthropic(base_url=here.url, api_key="secret", max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError, match="sim-8b"):
                await client.messages.create(model="sim-9b", **message)
            with pytest.raises(anthropic.APIStatusError, match="cannot go on"):
                async for _ in await client.messages.create(model=MODEL, stream=True, **message):
                    pass
        async with anthropic.AsyncAnthropic(base_url=here.url, api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.create(model=MODEL, **message)


async def test_tokens_are_counted_by_an_estimate_where_the_engine_has_no_path_for_it() -> None:
    async with stage() as here:
        worker = await here.worker("lack")
        worker.lacks = {"detail": "Not Found"}
        async with anthropic.AsyncAnthropic(base_url=here.url, api_key="none") as client:
            counted = await client.messages.count_tokens(model=MODEL, messages=MESSAGES)  # type: ignore[arg-type]
        assert counted.input_tokens == 5
