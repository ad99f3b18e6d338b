"""Components that are started one by one over an etcd, without any ``serve``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.fakes.components import RunningComponent
from tests.fakes.load import Outcome, stream_one
from tests.fakes.polling import eventually
from tests.fakes.servers import Server

Make = Callable[..., RunningComponent]


@pytest.fixture
def make(tmp_path: Path, etcd: Server) -> Iterator[Make]:
    made: list[RunningComponent] = []

    def start(*arguments: str) -> RunningComponent:
        made.append(RunningComponent(tmp_path, etcd.environment, *arguments, "--namespace", "box"))
        return made[-1].spawn()

    yield start
    for each in made:
        each.kill()


async def streamed(url: str, tokens: int) -> Outcome:
    async with aiohttp.ClientSession() as client:
        return await stream_one(client, url, "sim", "Tell me about the lights.", tokens)


async def is_streaming(url: str) -> bool:
    async with aiohttp.ClientSession() as client, client.get(f"{url}/metrics") as response:
        text = await response.text()
    return any(
        line.startswith("dynamo_frontend_inflight_requests") and not line.endswith(" 0.0")
        for line in text.splitlines()
    )


@pytest.mark.slow
async def test_a_frontend_is_killed_and_started_again_while_its_worker_stays(
    make: Make, tmp_path: Path
) -> None:
    worker = make("worker", "--model", "sim", "--speedup-ratio", "0", "--gpus", "1")
    first = make("frontend", "--port", "0", "--router-mode", "least-loaded")
    await asyncio.gather(worker.ready(), first.ready())
    assert (await streamed(first.public_url, 20)).is_complete
    (claim,) = (json.loads(each.read_text()) for each in (tmp_path / "node").iterdir())
    assert (claim["pid"], claim["namespace"]) == (worker.pid, "box")
    port = first.public_url.rpartition(":")[2]
    first.kill()
    again = await make("frontend", "--port", port).ready()
    second = await make("frontend", "--port", port, "--share-port").exit_code()
    assert second == 2
    assert (await streamed(again.public_url, 20)).is_complete
    again.interrupt()
    assert await again.exit_code() == 0
    worker.interrupt()
    assert await worker.exit_code() == 0
    assert not list((tmp_path / "node").iterdir())


async def test_ctrl_c_drains_a_worker_and_ctrl_c_again_ends_it(make: Make) -> None:
    slow = ("--model", "sim", "--speedup-ratio", "0.2")
    workers = [make("worker", *slow), make("worker", *slow)]
    frontend = make("frontend", "--port", "0")
    await asyncio.gather(*(each.ready() for each in (*workers, frontend)))
    streams = [asyncio.create_task(streamed(frontend.public_url, 40)) for _ in range(2)]
    await eventually(lambda: is_streaming(frontend.public_url))
    await asyncio.sleep(0.3)
    for worker in workers:
        worker.interrupt()
    await eventually(lambda: all("draining: 1 requests held" in worker.text for worker in workers))
    workers[1].interrupt()
    assert [await worker.exit_code() for worker in workers] == [0, 130]
    outcomes = await asyncio.gather(*streams)
    assert sorted(each.is_complete for each in outcomes) == [False, True]
