"""How the silence of a worker is told from its being busy, and from an outage."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynaplan.fleet.plugin import stall_detection
from dynaplan.fleet.plugin.stall_detection import HealthPoll, answers
from tests.fakes.polling import eventually


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall_detection, "HEALTH_POLL_S", 0.05)


class Store:
    def __init__(self) -> None:
        self.is_there, self.asked = True, 0

    async def __call__(self) -> bool:
        self.asked += 1
        return self.is_there


@asynccontextmanager
async def worker(answer: bytes) -> AsyncIterator[str]:
    """An HTTP server that answers so, or not at all."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            if not answer:
                await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


@asynccontextmanager
async def watching(store: Store, url: str) -> AsyncIterator[HealthPoll]:
    watch = HealthPoll(store, asyncio.Event())
    watch.poll({"w": url})
    try:
        yield watch
    finally:
        await watch.close()


async def test_a_frozen_worker_is_silent_for_longer_and_longer() -> None:
    frozen = socket.create_server(("127.0.0.1", 0))
    with frozen:
        async with watching(Store(), f"http://127.0.0.1:{frozen.getsockname()[1]}") as watch:
            await eventually(lambda: watch.silent_s.get("w", 0) >= 0.2)


async def test_a_worker_whose_port_is_closed_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with watching(Store(), url) as watch:
        await eventually(lambda: watch.silent_s.get("w", 0) >= 0.1)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 503 Service Unavailable\r\n\r\n"])
async def test_any_answer_counts_draining_too(answer: bytes) -> None:
    async with worker(answer) as url:
        assert await answers(url, 30)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "", "nonsense", "http://127.0.0.1:99999"])
async def test_an_address_that_is_none_does_not_answer(url: str) -> None:
    assert not await answers(url, 5)


async def test_what_is_no_http_server_does_not_answer() -> None:
    async with worker(b"x" * 100_000) as url:
        assert not await answers(url, 5)


async def test_while_the_store_is_away_no_silence_counts() -> None:
    store = Store()
    store.is_there = False
    async with watching(store, "http://127.0.0.1:1") as watch:
        await eventually(lambda: store.asked > 3)
        assert watch.silent_s == {}
        store.is_there = True
        await eventually(lambda: "w" in watch.silent_s)


async def test_who_is_not_watched_any_more_or_was_restarted_begins_anew() -> None:
    async with watching(Store(), "http://127.0.0.1:1") as watch:
        await eventually(lambda: "w" in watch.silent_s)
        watch.poll({"w": "http://127.0.0.1:2"})
        assert watch.silent_s == {}
        watch.poll({})
        assert watch.silent_s == {}


async def test_one_unanswered_question_alone_is_no_silence() -> None:
    wake = asyncio.Event()
    watch = HealthPoll(Store(), wake)
    watch.poll({"w": "http://127.0.0.1:1"})
    await wake.wait()
    assert watch.silent_s == {}
    await eventually(lambda: watch.silent_s)
    await watch.close()
