"""Several models behind one address, on memory for one and a half: none lost, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of
from tests.e2e.mixed_load import ask, mixed
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
"""Three models of which one at a time fits the GPU of 80 GB."""


def serving(directory: Path, config: str = CONFIG) -> Deployment:
    """One simulated GPU, and the models of that file; not started."""
    file = directory / "models.yaml"
    file.write_text(config)
    return Deployment(directory, str(file), "", "--gpus", "1")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    made = serving(tmp_path_factory.mktemp("models"))
    try:
        yield made.start()
    finally:
        made.close()


def log_of(deployment: Deployment, name: str) -> str:
    path = (
        deployment.directory
        / ".dynamo"
        / "logs"
        / deployment.namespace
        / f"{deployment.namespace}_{name}.log"
    )
    return path.read_text() if path.exists() else ""


def loads(deployment: Deployment) -> Counter[str]:
    """How often each model's worker was started."""
    return Counter(re.findall(r"start dynamo_([\w-]+?)(?:_\d+)?: ", log_of(deployment, "fleet")))


def misdirected(deployment: Deployment) -> list[str]:
    """The requests that were answered by another model's worker, by the frontend's access log."""
    answered = re.findall(r"model (\S+) at worker dynamo_(\S+),", log_of(deployment, "Frontend"))
    return [f"{model} by {worker}" for model, worker in answered if model != worker]


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


async def kill_serve(deployment: Deployment) -> None:
    serve, adoptions = await eventually(lambda: serve_of(deployment)), deployment.text.count("Adopted")
    serve.kill()
    await eventually(lambda: deployment.text.count("Adopted") > adoptions)


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


SLEEPING = """
Common: {engine: sim, memory: 50GB, startup-time: 3, ttl: 0, enable-sleep-mode: true}
Models: {ant: {}, bee: {}}
"""


async def test_an_idle_model_sleeps_for_another_and_a_request_wakes_it_without_a_load(tmp_path: Path) -> None:
    made = serving(tmp_path, SLEEPING)
    try:
        made.start()
        async with aiohttp.ClientSession() as session:
            for model in ("ant", "bee"):
                assert not (await ask(session, made.url, model, is_stream=False, tokens=4)).fault

            async def says(state: str) -> bool:
                async with session.get(f"{made.url}/v1/models") as answer:
                    listed = (await answer.json())["data"]
                return any(each["id"] == "ant" and each["status"]["value"] == state for each in listed)

            async with asyncio.timeout(60):
                while not await says("sleeping"):
                    await asyncio.sleep(0.1)
            assert "asleep" in (await asyncio.to_thread(made.run, "models")).stdout
            assert not (await ask(session, made.url, "ant", is_stream=True, tokens=4)).fault
        assert loads(made) == {"ant": 1, "bee": 1}
    finally:
        made.close()


class Asking:
    """A client of a deployment of models, who sees their states all the time."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url
        self.seen: list[dict[str, str]] = []

    async def states(self) -> dict[str, str]:
        async with self.session.get(f"{self.url}/v1/models") as response:
            return {each["id"]: each["status"]["value"] for each in (await response.json())["data"]}

    async def is_asleep(self, model: str) -> bool:
        return (await self.states())[model] == "sleeping"

    async def answered(self, *models: str) -> None:
        calls = [ask(self.session, self.url, each, is_stream=True, tokens=4) for each in models]
        assert [each.fault for each in await asyncio.gather(*calls)] == [""] * len(models)

    async def watch(self) -> None:
        while True:
            self.seen.append(await self.states())
            await asyncio.sleep(0.05)


async def test_who_kills_serve_a_sleeper_or_one_that_wakes_loses_no_request_and_memory_is_given_once(
    tmp_path: Path,
) -> None:
    made = serving(tmp_path, SLEEPING)

    def pid(model: str) -> int:
        return int(next((each["pid"] for each in made.workers(model).values()), 0))

    try:
        await asyncio.to_thread(made.start)
        async with aiohttp.ClientSession() as session:
            client = Asking(session, made.url)
            watching = asyncio.create_task(client.watch())
            await client.answered("ant")
            await client.answered("bee")
            await eventually(lambda: client.is_asleep("ant"))
            sleeper = pid("ant")
            await kill_serve(made)
            assert await client.is_asleep("ant")
            assert pid("ant") == sleeper, "a sleeper is adopted"

            waking = asyncio.create_task(client.answered("ant"))
            await eventually(lambda: client.is_asleep("bee"))
            os.kill(pid("ant"), signal.SIGKILL)
            await waking
            os.kill(pid("bee"), signal.SIGKILL)
            await client.answered("bee")
            together = asyncio.create_task(client.answered("ant", "bee"))
            await asyncio.sleep(0.2)
            os.kill(pid("bee"), signal.SIGKILL)  # it answers, or falls asleep for the other one
            await together
            watching.cancel()
        assert misdirected(made) == []
        held = [{name for name, state in each.items() if state == "loaded"} for each in client.seen]
        assert max(map(len, held)) == 1, "of two models one at a time fits"
    finally:
        made.close()


KILLS_S = (0.0, 0.05, 0.15, 0.4, 0.7, 1.0)
"""The moments after requests for a sleeper and for the model beside it, in seconds: waking takes 0.82 s."""


async def test_who_kills_the_fleet_plugin_while_a_model_sleeps_loses_no_request_and_memory_is_given_once(
    tmp_path: Path,
) -> None:
    made = serving(tmp_path, SLEEPING)

    def pids() -> dict[str, int]:
        return {name: int(each["pid"]) for name, each in made.workers().items() if "Frontend" not in name}

    try:
        await asyncio.to_thread(made.start)
        async with aiohttp.ClientSession() as session:
            client = Asking(session, made.url)
            watching = asyncio.create_task(client.watch())
            await client.answered("ant")
            await client.answered("bee")
            await eventually(lambda: client.is_asleep("ant"))
            begun = pids()
            await kill_plugin(made)
            assert await client.is_asleep("ant")
            assert pids() == begun, "the sleeper stays, and nothing is started beside it"
            for number, after_s in enumerate(KILLS_S):
                order = ("ant", "bee") if number % 2 else ("bee", "ant")
                asked = asyncio.create_task(client.answered(*order))
                await asyncio.sleep(after_s)
                await kill_plugin(made)
                await asked
            watching.cancel()
        assert misdirected(made) == []
        held = [{name for name, state in each.items() if state == "loaded"} for each in client.seen]
        assert max(map(len, held)) == 1, "of two models one at a time fits"
        assert pids() == begun, "each was woken, and none loaded again"
    finally:
        made.close()


async def kill_plugin(deployment: Deployment) -> None:
    """Kill the fleet plugin, and wait until circus has started it again."""

    def plugin() -> int:
        for each in deployment.children():
            with suppress(psutil.Error):
                if any("FleetPlugin" in word for word in each.cmdline()):
                    return each.pid
        return 0

    killed = int(await eventually(plugin))
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: plugin() not in (0, killed))


GROWING = """
Common: {engine: sim, memory: 50GB, startup-time: 0.3, max-swap-wait: 0.5, ttl: 0}
Frontend: {access-log: true}
Models:
  ant: {max-workers: 2, requests-per-worker: 4}
  bee: {}
"""


async def test_a_model_grows_under_a_burst_and_gives_its_second_gpu_to_another_without_losing_a_request(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(GROWING)
    made = Deployment(tmp_path, str(file), "", "--gpus", "2")
    try:
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
    finally:
        made.close()


def _ready(deployment: Deployment, name: str) -> int:
    return sum(each.get("state") == "ready" for each in deployment.workers(name).values())
