"""The worker's own server in front of its engine's."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from dynaplan.util.sockets import bound_socket, free_port
from dynaplan.worker.engine_worker.relay import Relay
from dynaplan.worker.server import WorkerServer

SEEN: list[web.Request] = []


async def streams(request: web.Request) -> web.StreamResponse:
    """Answer in two pieces, as an engine streams; break off after the first when told to."""
    SEEN.append(request)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    if request.query.get("break"):
        assert request.transport
        request.transport.abort()
        return response
    await response.write(await request.read())
    return response


async def refuses(request: web.Request) -> web.Response:
    return web.json_response({"error": "no"}, status=400)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """The address of a worker whose engine is behind it."""
    app = web.Application()
    app.router.add_post("/v1/completions", streams)
    app.router.add_post("/v1/chat/completions", refuses)
    engine = TestServer(app)
    await engine.start_server()
    async for served in relayed(str(engine.make_url("")).rstrip("/")):
        yield served
    await engine.close()


async def relayed(engine_url: str) -> AsyncIterator[str]:
    relay = Relay(engine_url, "token")
    worker = WorkerServer(bound_socket("127.0.0.1", 0), "token")
    await worker.start(relay.routes())
    yield worker.url
    await worker.stop()
    await relay.close()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer token"}) as made:
        yield made


async def test_an_answer_comes_through_with_status_type_and_every_byte(
    url: str, client: aiohttp.ClientSession
) -> None:
    headers = {"Content-Type": "application/json", "X-Request-Id": "r1", "X-Other": "no"}
    async with client.post(f"{url}/v1/completions?n=2", data=b'{"a": 1}', headers=headers) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert await answer.read() == b'data: 1\n\n{"a": 1}'
    seen = SEEN[-1]
    assert (seen.headers["X-Request-Id"], seen.headers["Authorization"]) == ("r1", "Bearer token")
    assert seen.query_string == "n=2"
    assert "X-Other" not in seen.headers
    async with client.post(f"{url}/v1/chat/completions", data=b"{}") as answer:
        assert (answer.status, await answer.json()) == (400, {"error": "no"})


async def test_without_the_token_nothing_is_sent_on(url: str) -> None:
    before = len(SEEN)
    async with aiohttp.ClientSession() as stranger, stranger.post(f"{url}/v1/completions") as answer:
        assert answer.status == 401
    assert len(SEEN) == before


async def test_an_answer_that_breaks_off_does_not_look_whole(url: str, client: aiohttp.ClientSession) -> None:
    async with client.post(f"{url}/v1/completions?break=1", data=b"x") as answer:
        with pytest.raises(aiohttp.ClientError):
            await answer.read()


async def test_an_engine_that_cannot_be_reached_has_not_begun(client: aiohttp.ClientSession) -> None:
    async for url in relayed(f"http://127.0.0.1:{free_port()}"):
        async with client.post(f"{url}/v1/completions", data=b"x") as answer:
            assert answer.status == 503
