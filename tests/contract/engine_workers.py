"""Engines as a worker serves them, for the tests of what every engine must do and of what one does.

The server is the worker's: it adds the engine's routes and demands the token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynaplan.engines import registry
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.sockets import bound_socket
from dynaplan.worker.server import WorkerServer

TOKEN = "secret"


@dataclass(frozen=True)
class Kind:
    """One engine under test.

    ``options`` makes those that every test needs, ``slow`` are added where a request must take a second or
    more; ``module`` is what must be installed.
    """

    name: str
    options: Callable[[pytest.FixtureRequest], Mapping[str, Any]]
    slow: Mapping[str, Any]
    module: str = "dynaplan"


def tiny_llamacpp(request: pytest.FixtureRequest) -> Mapping[str, Any]:
    """A tiny random model, and few threads: many engines are made in one test process."""
    model = request.getfixturevalue("tiny_gguf")
    return {"model": str(model), "max-model-len": 8192, "threads": 1, "threads-http": 16}


KINDS = {
    kind.name: kind
    for kind in (
        Kind("sim", lambda _: {"speedup-ratio": 0, "max-model-len": 20_000}, {"speedup-ratio": 1}),
        Kind("llamacpp", tiny_llamacpp, {}, "xllamacpp"),
    )
}


@dataclass
class Worker:
    """One served engine; ``url`` is where its OpenAI API is."""

    engine: Any
    url: str
    session: aiohttp.ClientSession

    async def ask(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        """Status and document of one request that is no stream."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return response.status, await response.json()

    async def stream(self, body: Any, path: str = "/v1/completions") -> list[Any]:
        """The events of a stream that ended with [DONE]."""
        headers = {"Connection": "close"}  # llama.cpp closes kept connections, at times as one is used again
        data = {**body, "stream": True}
        async with self.session.post(self.url + path, json=data, headers=headers) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            text = (await response.read()).decode()
        events = text.split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def requests(self) -> int:
        """How many requests the engine has now."""
        return int(await self.engine.count_requests())

    async def prefill(self, request: RemotePrefillRequest) -> Mapping[str, Any]:
        """What the engine hands over; AssertionError unless it does so exactly once."""
        handed_over: list[Mapping[str, Any]] = []

        async def hand_off_ready(fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
            handed_over.append(fields)

        await self.engine.prefill(request, hand_off_ready)
        (fields,) = handed_over
        return fields


StartWorker = Callable[..., Awaitable[Worker]]


@asynccontextmanager
async def starting(scratch_dir: Path, token: str = TOKEN) -> AsyncIterator[StartWorker]:
    """Starts workers: ``await start("sim", {"model": "m"})``; all end with the context."""
    cleanups: list[Callable[[], Awaitable[Any]]] = []

    async def start(
        name: str,
        options: Mapping[str, Any],
        *,
        role: str = "decode",
    ) -> Worker:
        server = WorkerServer(bound_socket("127.0.0.1", 0), token)
        address = server.url
        context = EngineContext(
            f"ns_Worker_{len(cleanups)}", role, address, token=token, scratch_dir=str(scratch_dir)
        )
        engine = registry.make_engine(name, options, context)
        session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"})

        async def stop() -> None:
            await session.close()
            await stop_at_once(engine)
            await server.stop()

        cleanups.append(stop)
        await engine.start()
        await server.start(engine.routes())
        return Worker(engine, engine.url or address, session)

    try:
        yield start
    finally:
        for cleanup in reversed(cleanups):
            await cleanup()


async def stop_at_once(engine: Engine) -> None:
    """Stop it as a worker does whose deadline is over: without waiting for its hand-offs."""
    stopping = asyncio.create_task(engine.stop())
    await asyncio.wait({stopping}, timeout=0.1)
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)


@asynccontextmanager
async def raw_post(worker: Worker, body: dict[str, Any]) -> AsyncIterator[asyncio.StreamReader]:
    """A request on a bare connection that is closed at the end, answered or not."""
    host, port = worker.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    head += "Content-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        yield reader
    finally:
        writer.close()
        await writer.wait_closed()
