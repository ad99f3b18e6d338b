"""The requests in flight while ``serve`` ends."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynaplan.fleet.shutdown import requests_in_flight, show_drain
from dynaplan.util.metrics import PREFIX, render
from dynaplan.util.progress import ProgressLine
from tests.fakes.polling import eventually


@asynccontextmanager
async def process(body: bytes) -> AsyncIterator[str]:
    """The URL of a process that answers every question with that body, as a worker's HTTP server does."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\n")
        for start in range(0, len(body), 100):
            writer.write(body[start : start + 100])
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def metrics(requests: float) -> bytes:
    labels = {"dynamo_namespace": "ns", "worker": "ns_Frontend"}
    return render({"before": 1.0, f"{PREFIX}inflight_requests": requests, "after": 2.0}, labels).encode()


async def test_the_requests_of_all_that_answer_are_added_up() -> None:
    async with process(metrics(3)) as one, process(metrics(2)) as two, process(b"nonsense") as three:
        assert await requests_in_flight([one, two, three, "http://127.0.0.1:1", "http://["]) == 5
    assert await requests_in_flight([]) == 0


async def test_they_are_shown_with_the_time_that_is_left_until_none_is() -> None:
    shown = io.StringIO()
    async with process(metrics(3)) as url:
        task = asyncio.create_task(show_drain([url], 30.0, ProgressLine(shown, every_s=0.0)))
        await eventually(lambda: shown.getvalue())
        task.cancel()
        await asyncio.wait({task})
    assert shown.getvalue().splitlines()[0] in (
        "3 requests in flight, at most 00:30 left",
        "3 requests in flight, at most 00:29 left",
    )
