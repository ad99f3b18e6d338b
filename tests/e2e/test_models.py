"""Several models behind one address, on memory for one and a half: none lost, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import kill_serve
from tests.e2e.mixed_load import ask, mixed
from tests.e2e.several_models import loads, misdirected, serving
from tests.fakes.polling import eventually

MODELS = ("ant", "bee", "cow")

CONFIG = """
Common: {engine: sim, memory: 50GB, startup-time: 0.3, max-swap-wait: 0.5, ttl: 0}
Frontend: {access-log: true}
Models:
  ant: {aliases: [emmet]}
  bee: {}
  cow: {}
"""
"""Three models of which one at a time fits the GPU of 80 GiB."""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving(tmp_path_factory.mktemp("models"), CONFIG) as made:
        yield made.start()


async def test_requests_for_three_models_are_all_answered_by_their_own(deployment: Deployment) -> None:
    answers = await mixed(deployment.url, [*MODELS, "emmet"], requests=200, clients=60)
    assert [each for each in answers if each.fault] == []
    assert len(answers) == 200
    assert misdirected(deployment) == []
    started = loads(deployment)
    assert set(started) == set(MODELS)
    assert sum(started.values()) < 50, "requests of a model are served together"


async def test_fifty_callers_of_a_cold_model_cause_one_load_and_one_that_leaves_none(
    deployment: Deployment,
) -> None:
    await asyncio.to_thread(deployment.run, "unload", "bee")
    before = loads(deployment)
    async with aiohttp.ClientSession() as session:
        leaving = asyncio.create_task(ask(session, deployment.url, "bee", is_stream=True, tokens=4))
        calls = [ask(session, deployment.url, "bee", is_stream=True, tokens=4) for _ in range(50)]
        rest = asyncio.gather(*calls)
        await eventually(lambda: deployment.workers("bee"))
        leaving.cancel()
        assert [each.fault for each in await rest if each.fault] == []
    assert loads(deployment) - before == {"bee": 1}


async def test_an_unknown_model_is_refused_with_the_known_names_and_polls_load_nothing(
    deployment: Deployment,
) -> None:
    before = loads(deployment)
    async with aiohttp.ClientSession() as session:
        answer = await ask(session, deployment.url, "bea", is_stream=False, tokens=4)
        assert "404" in answer.fault
        assert "bee" in answer.fault
        for path in ("/v1/models", "/v1/models/bee", "/health", "/metrics"):
            async with session.get(deployment.url + path) as response:
                assert response.status == 200, path
    listed = deployment.get_json("/v1/models")["data"]
    assert {each["id"] for each in listed} == {*MODELS, "emmet"}
    assert all(each["status"]["value"] in ("loaded", "loading", "unloaded") for each in listed)
    assert loads(deployment) == before


async def test_who_kills_serve_a_loading_worker_or_a_draining_one_loses_no_request(
    deployment: Deployment,
) -> None:
    await asyncio.to_thread(deployment.run, "unload", "cow")
    answers = asyncio.create_task(mixed(deployment.url, MODELS, requests=90, clients=20, tokens=16))
    for kill in (kill_loading, kill_serve, kill_draining):
        await kill(deployment)
    assert [each for each in await answers if each.fault] == []
    assert misdirected(deployment) == []


async def kill_loading(deployment: Deployment) -> None:
    os.kill(await _in_state(deployment, "starting"), signal.SIGKILL)


async def kill_draining(deployment: Deployment) -> None:
    os.kill(await _in_state(deployment, "draining"), signal.SIGKILL)


async def _in_state(deployment: Deployment, state: str) -> int:
    def pid() -> int:
        found = [each["pid"] for each in deployment.workers().values() if each.get("state") == state]
        return next((each for each in found if each), 0)

    return int(await eventually(pid, interval_s=0.005))


async def test_a_pinned_model_stays_until_it_is_put_away(deployment: Deployment) -> None:
    async def run(*words: str) -> str:
        result = await asyncio.to_thread(deployment.run, *words)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "bee is ready" in await run("pin", "bee")
    async with aiohttp.ClientSession() as session:
        refused = await ask(session, deployment.url, "cow", is_stream=False, tokens=4)
        assert "409" in refused.fault
        assert "beside bee" in refused.fault
        await run("unload", "bee")
        answered = await ask(session, deployment.url, "cow", is_stream=False, tokens=4)
        assert answered.fault == ""


GROWING = """
Common: {engine: sim, memory: 50GB, startup-time: 0.3, max-swap-wait: 0.5, ttl: 0}
Frontend: {access-log: true}
Models:
  ant: {max-workers: 2, requests-per-worker: 4}
  bee: {}
"""


@pytest.mark.slow
async def test_a_model_grows_under_a_burst_and_gives_its_second_gpu_to_another_without_losing_a_request(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(GROWING)
    with Deployment(tmp_path, str(file), "", "--gpus", "2") as made:
        deployment = await asyncio.to_thread(made.start)
        burst = asyncio.create_task(mixed(deployment.url, ["ant"], requests=200, clients=20, tokens=200))
        await eventually(lambda: _ready(deployment, "ant") == 2)
        async with aiohttp.ClientSession() as session:
            other = await ask(session, deployment.url, "bee", is_stream=True, tokens=4)
        assert other.fault == ""
        assert not burst.done(), "the burst was too short to show anything"
        assert _ready(deployment, "ant") == 1
        assert [each.fault for each in await burst if each.fault] == []
        why = await asyncio.to_thread(deployment.run, "why")
        assert "makes room for bee: other workers of ant go on" in why.stdout


def _ready(deployment: Deployment, name: str) -> int:
    return sum(each.get("state") == "ready" for each in deployment.workers(name).values())
