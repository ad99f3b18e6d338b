"""Several frontends on one port count, limit and drain as one, and a killed one takes only its own."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest

from dynaplan.contract.model_keys import MODEL_DEMAND, NO_DEMAND, demand_in
from dynaplan.store import connections as stores
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.mixed_load import ask
from tests.e2e.test_kills import QUIET, is_whole
from tests.fakes.load import Load, stream_one
from tests.fakes.polling import eventually

Deploy = Callable[..., Deployment]

STREAMS = 24
SLOW = "--VllmWorker.speedup-ratio=0.2"
"""Streams that take seconds with few chunks."""

KEY = "sk-right"


def of(frontends: int) -> str:
    return f"--Frontend.ServiceArgs.workers={frontends}"


def gauge(deployment: Deployment, name: str, key: str = "") -> float:
    """The sum of a metric's samples, as whichever frontend answers tells it."""
    request = urllib.request.Request(f"{deployment.url}/metrics", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=20) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(rf"^dynamo_frontend_{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)))


def connections(deployment: Deployment) -> Counter[int]:
    """The clients that are connected to each frontend, by its pid."""
    port = urlsplit(deployment.url).port
    return Counter(
        {
            worker["pid"]: sum(
                each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
                for each in psutil.Process(worker["pid"]).net_connections("tcp")
            )
            for worker in deployment.workers("Frontend").values()
        }
    )


@pytest.mark.parametrize("frontends", [2, pytest.param(4, marks=pytest.mark.slow)])
async def test_frontends_count_as_one_and_ctrl_c_cuts_no_stream_of_any(
    deploy: Deploy, frontends: int
) -> None:
    deployment = await asyncio.to_thread(
        deploy, "graphs.agg:Frontend", "agg.yaml", SLOW, of(frontends), *QUIET
    )
    async with Load(deployment.url, MODEL, clients=STREAMS, tokens=200) as load:
        await eventually(load.streams)
        load.send_no_more()
        assert all(connections(deployment).values()), "a frontend got no stream"
        await eventually(lambda: gauge(deployment, "inflight_requests") == STREAMS)
        for _ in range(2 * frontends):
            assert await asyncio.to_thread(gauge, deployment, "inflight_requests") == STREAMS
        shown = json.loads((await asyncio.to_thread(deployment.run, "status", "--json")).stdout)
        roles = Counter(worker["role"] for worker in shown["workers"])
        assert (roles["frontend"], roles["decode"]) == (frontends, 1)
        assert await asyncio.to_thread(deployment.stop) == 0
    assert load.incomplete == []
    assert len(load.outcomes) == STREAMS


@pytest.mark.slow
async def test_a_killed_frontend_cuts_its_own_streams_and_the_others_go_on(deploy: Deploy) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", SLOW, of(4), *QUIET)
    async with Load(deployment.url, MODEL, clients=STREAMS, tokens=200) as load:
        await eventually(load.streams)
        load.send_no_more()
        victim, own = connections(deployment).most_common(1)[0]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: gauge(deployment, "inflight_requests") == STREAMS - own)
        assert await asyncio.to_thread(gauge, deployment, "requests_started_total") == STREAMS
    assert len(load.incomplete) == own < STREAMS
    await eventually(lambda: is_whole(deployment) and len(connections(deployment)) == 4)
    assert victim not in connections(deployment)
    await eventually(lambda: gauge(deployment, "inflight_requests") == 0)
    why = await asyncio.to_thread(deployment.run, "status")
    assert re.search(r"Frontend\S* .* 1$", why.stdout, re.MULTILINE), why.stdout


@pytest.mark.slow
async def test_waiting_requests_are_limited_in_all_and_every_frontend_asks_for_the_key(
    deploy: Deploy,
) -> None:
    options = ("--VllmWorker.speedup-ratio=0.01", "--Frontend.max-waiting-requests=8", of(4), *QUIET)
    environment = {"DYNAPLAN_API_KEY": KEY}
    deployment = await asyncio.to_thread(
        deploy, "graphs.agg:Frontend", "agg.yaml", *options, environment=environment
    )
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:

        async def stream(key: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {key}"}
            ended = await stream_one(session, deployment.url, MODEL, "word " * 2000, 2, headers)
            return ended.status, ended.error

        wrong = await asyncio.gather(*(stream("sk-wrong") for _ in range(16)))
        assert {status for status, _ in wrong} == {401}
        answers = Counter(status for status, _ in await asyncio.gather(*(stream(KEY) for _ in range(48))))
    assert set(answers) == {200, 429}
    assert 4 <= answers[200] <= 8


MODELS = """
Common: {engine: sim, memory: 50GB, startup-time: 5, max-swap-wait: 0.5, ttl: 0}
Frontend: {ServiceArgs: {workers: 4}}
Models: {ant: {}, bee: {}}
"""


@pytest.mark.slow
async def test_callers_at_four_frontends_cause_one_load_that_a_killed_frontend_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models.yaml").write_text(MODELS)
    deployment = Deployment(tmp_path, str(tmp_path / "models.yaml"), "", "--gpus", "1")

    async def waiting() -> int:
        """The requests that wait for ant at all frontends: what ``dynaplan models`` adds up."""
        published = await store.list(MODEL_DEMAND.prefix("dynamo"))
        return demand_in(each.value for each in published).get("ant", NO_DEMAND).waiting

    def all_wait(number: int) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return await waiting() == number

        return check

    def kill() -> int:
        """Kill the frontend with the most clients; return their number."""
        victim, own = connections(deployment).most_common(1)[0]
        os.kill(victim, signal.SIGKILL)
        return own

    try:
        await asyncio.to_thread(deployment.start)
        for variable, value in deployment.clients_environment().items():
            monkeypatch.setenv(variable, value)
        store = stores.connect_store()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=2**20) as session:
            calls = [
                asyncio.create_task(ask(session, deployment.url, "ant", is_stream=True, tokens=200))
                for _ in range(50)
            ]
            await eventually(lambda: sum(connections(deployment).values()) == 50)
            await eventually(all_wait(50))
            assert kill() < 50
            answers = await asyncio.gather(*calls)  # of the killed one: at the others, or begun
            assert [each.fault for each in answers if each.fault and "Ask again" not in each.fault] == []
            assert loads(deployment) == {"ant": 1}

            ordered = asyncio.create_task(asyncio.to_thread(deployment.run, "load", "bee"))
            await eventually(lambda: deployment.workers("bee"))
            kill()
            assert "bee is ready" in (await ordered).stdout
            assert loads(deployment) == {"ant": 1, "bee": 1}
        await store.close()
    finally:
        deployment.close()


def loads(deployment: Deployment) -> Counter[str]:
    """How often each model's worker was started."""
    log = deployment.directory / ".dynamo" / "logs" / "dynamo" / "dynamo_fleet.log"
    found = re.findall(r"start dynamo_(\w+?)(?:_\d+)?: ", log.read_text())
    return Counter(each for each in found if each in ("ant", "bee"))
