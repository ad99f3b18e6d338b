"""Random faults in a running deployment under steady load: each request ends once, and all is whole again.

``DYNAPLAN_CHAOS_SEEDS=7 pytest tests/chaos/test_deployment.py`` repeats a failing seed; ``DYNAPLAN_CHAOS_S``
is how long each seed lasts, in seconds. The faults of a seed are the same, what they meet is not.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import aiohttp
import pytest

from dynaplan.events.nats_messenger import NatsMessenger
from dynaplan.events.prefill_requests import prefill_stream
from tests.chaos.deployment_faults import VICTIMS, Chaos
from tests.chaos.history import Request, drawn, told
from tests.chaos.judging import Judge
from tests.chaos.preloading import Preloaded, preloaded
from tests.chaos.witness import Witness
from tests.e2e.deployment import EXECUTED, MODEL, Deployment
from tests.e2e.test_kills import is_whole
from tests.e2e.traces import IS_TORTURE, files_of, processes_of, small_disk
from tests.fakes.polling import eventually

LASTS_S = float(os.environ.get("DYNAPLAN_CHAOS_S", "300" if IS_TORTURE else "10"))
ALL_SEEDS = ",".join(map(str, range(1, 13))) if IS_TORTURE else "1"
SEEDS = [int(seed) for seed in os.environ.get("DYNAPLAN_CHAOS_SEEDS", ALL_SEEDS).split(",")]
GPUS = 6
CLIENTS = 4
SLACK_S = 3.0
DISK_KB = 1024
PROMPT = "word " * 900


class ChaosClients:
    """Clients of the deployment, each sending its next request when the last one has ended."""

    def __init__(self, url: str, chaos: Chaos) -> None:
        self.url = url
        self.dice = random.Random(f"clients {chaos.seed}")
        self.history: list[Request] = []
        self._is_over = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(CLIENTS)]

    async def stop(self) -> None:
        self._is_over = True
        await asyncio.gather(*self._tasks)

    async def _client(self) -> None:
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            while not self._is_over:
                number = len(self.history)
                request = drawn(self.dice, number, time.monotonic(), MODEL, f"{number} {PROMPT}", 40)
                self.history.append(request)
                await send(session, self.url, request)


async def send(session: aiohttp.ClientSession, url: str, request: Request) -> None:
    try:
        async with session.post(url + request.path, json=request.body) as response:
            request.status = response.status
            if request.is_stream and response.status == 200:
                async for line in response.content:
                    request.read_line(line)
            else:
                request.read_whole(await response.json())
    except (aiohttp.ClientError, TimeoutError) as error:
        request.broken = repr(error)
    request.ended_s = time.monotonic()


async def prefill_queue_depth(deployment: Deployment) -> int:
    messenger = await NatsMessenger.from_environment(deployment.clients_environment())
    try:
        return await (await messenger.queue(prefill_stream(deployment.namespace))).depth()
    finally:
        await messenger.close()


@pytest.fixture
def state_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A disk of its own for the statefile; None where this process may not mount one."""
    with ExitStack() as stack:
        disk = None
        with suppress(OSError):
            disk = stack.enter_context(small_disk(tmp_path / "state", DISK_KB))
        yield disk


@pytest.fixture
def library(tmp_path: Path) -> Preloaded | None:
    return preloaded(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(LASTS_S + 150)
@pytest.mark.parametrize("seed", SEEDS)
async def test_whatever_dies_the_service_is_whole_in_the_end_and_no_request_is_lost(
    state_disk: Path | None, library: Preloaded | None, deploy: Callable[..., Deployment], seed: int
) -> None:
    options = ("--Planner.no-operation=true", "--gpus", str(GPUS))
    environment = EXECUTED | (library.environment if library else {})
    deployment = await asyncio.to_thread(
        deploy, "graphs.disagg:Frontend", "disagg.yaml", *options, environment=environment
    )
    judge = Judge(SLACK_S)
    chaos = Chaos(deployment, seed, judge, state_disk, library)
    witness, clients = Witness(deployment, chaos), ChaosClients(deployment.url, chaos)
    await chaos.run(LASTS_S)
    await whole_again(deployment, chaos)
    await clients.stop()
    story = "\n".join([f"DYNAPLAN_CHAOS_SEEDS={seed}", *chaos.story])
    wrong = list(judge.judge(clients.history))
    assert not wrong, "\n".join([story, *wrong])
    assert len(clients.history) > LASTS_S, story
    await ends_well(deployment, witness, story)
    failed = sum(not request.is_whole for request in clients.history)
    print(f"{story}\n{len(clients.history)} requests, {failed} not whole, {witness.samples} looks")
    print(told(clients.history))


async def ends_well(deployment: Deployment, witness: Witness, story: str) -> None:
    """All is as it was asked for; nothing wrong was seen; and at the end nothing is left."""
    await asyncio.to_thread(deployment.scale, decode=2, prefill=3)
    counts = {"VllmWorker": 2, "PrefillWorker": 3}
    await eventually(
        lambda: (
            is_whole(deployment)
            and all(len(deployment.workers(name)) == count for name, count in counts.items())
        ),
        60,
    )
    await witness.end()
    assert witness.wrong == [], story
    assert witness.most_users > 1
    assert witness.samples > 5 * LASTS_S
    assert await prefill_queue_depth(deployment) == 0
    assert_no_process_beyond_the_tree(deployment)
    assert await asyncio.to_thread(deployment.stop) == 0
    assert (processes_of(deployment), files_of(deployment)) == ({}, [])


async def whole_again(deployment: Deployment, chaos: Chaos) -> None:
    """Wait until every worker is ready; a failure tells what was done, and what the plugin says of it."""
    try:
        await eventually(lambda: is_whole(deployment), 45)
    except AssertionError:
        workers = {
            name: {key: worker[key] for key in ("state", "pid", "url", "reason", "restarts_s")}
            for name, worker in deployment.workers().items()
        }
        logs = sorted(deployment.directory.rglob("*.log"))
        ends = [f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs]
        story = "\n".join(chaos.story)
        raise AssertionError(f"{story}\n{json.dumps(workers)}\n" + "\n".join(ends)) from None


def assert_no_process_beyond_the_tree(deployment: Deployment) -> None:
    processes = processes_of(deployment)
    workers = {worker["pid"] for worker in deployment.workers().values()}
    others = {pid: line for pid, line in processes.items() if pid not in workers}
    assert workers <= set(processes)
    servers = {"etcd", "nats"} & VICTIMS.keys()
    assert len(others) == 1 + len(servers), others  # the plugin, and the servers that the store needs
