"""What a request and an event of a stream cost the frontend, in calls of its own functions.

Time depends on the machine, the number of calls does not: so it does not grow unseen. A change that costs
more of them changes a baseline here, and says in its commit what it buys. Python 3.12 makes fewer calls.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dynaplan
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.store.instances import Instance
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.keys import write_keys
from tests.fakes.polling import eventually

CALLS_OF_REQUEST = 211
"""A chat with a stream of two events, round-robin, everything as it is by default."""

CALLS_WITH_KEYS = 232
"""The same with one of 50 keys that have all limits, while nobody else waits."""

CALLS_OF_LIMIT = 1
"""A planner's limit of running requests, where there is a place."""

CALLS_OF_EVENT = 4
"""Each further event, which comes and goes by itself."""

PATH = "/v1/chat/completions"
CARD = {"model": "m", "context_tokens": 8192, "kv_block_tokens": 16, "engine": "vllm"}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(event: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(event), event)


class LockStep:
    """An engine and a client of one stream: the next event is sent when the last one has arrived."""

    def __init__(self) -> None:
        self.engine: asyncio.StreamWriter | None = None
        self.has_asked = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.engine = writer
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(size)
                self.has_asked.set()
        except asyncio.IncompleteReadError:
            writer.close()

    async def stream(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, events: int
    ) -> None:
        """Make one request, whose answer has that many events."""
        self.has_asked.clear()
        writer.write(request)
        await self.has_asked.wait()
        assert self.engine
        self.engine.write(HEAD + chunk(TOKEN))
        await reader.readuntil(TOKEN)
        for _ in range(events - 1):
            self.engine.write(chunk(TOKEN))
            await reader.readuntil(TOKEN)
        self.engine.write(chunk(DONE) + b"0\r\n\r\n")
        await reader.readuntil(b"\r\n0\r\n\r\n")


@asynccontextmanager
async def lock_step(**options: Any) -> AsyncIterator[tuple[Stage, LockStep]]:
    step = LockStep()
    server = await asyncio.start_server(step.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with stage(**options) as here:
        instance = Instance("ns", "VllmWorker", "generate", 1, url, "w", 0, CARD, url)
        await here.store.put(instance.key, instance.to_json())
        await here.know(instance)
        yield here, step
    server.close()
    await server.wait_closed()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The calls of dynaplan's functions while the block lasts, by function."""
    calls: Counter[str] = Counter()
    package = dynaplan.__path__[0]

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            calls[f"{code.co_filename.removeprefix(package)}:{code.co_qualname}"] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


async def calls_of(here: Stage, step: LockStep, events: int, key: str = "") -> Counter[str]:
    """The calls of a request with that many events; the fewest of some, for timers make calls, too."""
    text = json.dumps(body(PATH, model="m", stream=True)).encode()
    bearing = f"Authorization: Bearer {key}\r\n" if key else ""
    request = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n{bearing}Content-Length: {len(text)}\r\n\r\n".encode()
        + text
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
    found = []
    for _ in range(6):
        with counted() as calls:
            await step.stream(reader, writer, request, events)
        found.append(calls)
    writer.close()
    return min(found[1:], key=lambda calls: calls.total())


async def test_a_request_and_an_event_make_no_more_calls_than_the_baseline() -> None:
    async with lock_step() as (here, step):
        short, long = await calls_of(here, step, 2), await calls_of(here, step, 42)
    of_event = Counter({name: round(count / 40) for name, count in (long - short).items()})
    assert (long.total() - short.total()) / 40 <= CALLS_OF_EVENT, of_event.most_common()
    assert short.total() <= CALLS_OF_REQUEST, short.most_common()


async def test_a_request_with_one_of_many_keys_makes_no_more_calls_than_the_baseline(tmp_path: Path) -> None:
    limits = {"concurrency": 9, "requests-per-minute": 999, "tokens-per-minute": 9999}
    file = write_keys(tmp_path / "keys.yaml", {f"k{number}": limits for number in range(50)})
    async with lock_step(api_keys=str(file)) as (here, step):
        calls = await calls_of(here, step, 2, "sk-k0")
    assert calls.total() <= CALLS_WITH_KEYS, calls.most_common()


async def test_a_limit_of_running_requests_costs_no_more_calls_than_its_baseline() -> None:
    async with lock_step() as (here, step):
        before = await calls_of(here, step, 2)
        for model in here.frontend._models.all:
            model.router.places.follow(RunningLimit(100, wait_s=1.0, ends_per_s=1.0).to_text())
        after = await calls_of(here, step, 2)
    assert after.total() - before.total() <= CALLS_OF_LIMIT, (after - before).most_common()


def of_the_path(objects: Iterable[object]) -> Counter[str]:
    """The objects of the frontend's path among these, by type."""
    kinds = (type(each) for each in objects)
    return Counter(each.__qualname__ for each in kinds if "dynaplan.gateway." in str(each.__module__))


@pytest.mark.slow
async def test_requests_and_their_connections_leave_nothing_to_the_garbage_collector() -> None:
    def has_connections() -> bool:
        alive = of_the_path(gc.get_objects())
        return bool(alive["ClientConnection"] + alive["ServerConnection"])

    async with lock_step() as (here, step):
        gc.collect()  # what other tests have left
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)  # what a collection finds is kept in gc.garbage
        try:
            await calls_of(here, step, 2)
            assert step.engine
            step.engine.close()
            await eventually(lambda: not has_connections())
            gc.collect()
            left = of_the_path(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert left == {}
