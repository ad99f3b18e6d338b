"""Models that sleep instead of being unloaded: whatever is killed, nothing is lost or given twice."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import kill_serve
from tests.e2e.mixed_load import ask
from tests.e2e.several_models import loads, misdirected, serving
from tests.e2e.traces import IS_TORTURE
from tests.fakes.polling import eventually

SLEEPING = """
Common: {engine: sim, memory: 50GB, startup-time: 3, ttl: 0, enable-sleep-mode: true}
Frontend: {access-log: true}
Models: {ant: {}, bee: {}}
"""


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


@pytest.mark.slow
async def test_an_idle_model_sleeps_for_another_and_a_request_wakes_it_without_a_load(tmp_path: Path) -> None:
    with serving(tmp_path, SLEEPING) as made:
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


@asynccontextmanager
async def a_sleeper(directory: Path) -> AsyncIterator[tuple[Deployment, Asking]]:
    """A deployment in which ant sleeps and bee is loaded; at the end no memory was given twice."""
    with serving(directory, SLEEPING) as made:
        await asyncio.to_thread(made.start)
        async with aiohttp.ClientSession() as session:
            client = Asking(session, made.url)
            watching = asyncio.create_task(client.watch())
            await client.answered("ant")
            await client.answered("bee")
            await eventually(lambda: client.is_asleep("ant"))
            yield made, client
            watching.cancel()
        assert misdirected(made) == []
        held = [{name for name, state in each.items() if state == "loaded"} for each in client.seen]
        assert max(map(len, held)) == 1, "of two models one at a time fits"


def pids(deployment: Deployment) -> dict[str, int]:
    """The processes of the models' workers, by model."""
    workers = deployment.workers().items()
    return {name: int(each["pid"]) for name, each in workers if "Frontend" not in name}


async def test_who_kills_serve_a_sleeper_or_one_that_wakes_loses_no_request_and_memory_is_given_once(
    tmp_path: Path,
) -> None:
    async with a_sleeper(tmp_path) as (made, client):

        def pid(model: str) -> int:
            return int(next((each["pid"] for each in made.workers(model).values()), 0))

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


KILLS_S = (0.0, 0.05, 0.15, 0.4, 0.7, 1.0) if IS_TORTURE else (0.05, 0.4, 0.7)
"""The moments after requests for a sleeper and for the model beside it, in seconds: waking takes 0.82 s."""


@pytest.mark.slow
async def test_who_kills_the_fleet_plugin_while_a_model_sleeps_loses_no_request_and_memory_is_given_once(
    tmp_path: Path,
) -> None:
    async with a_sleeper(tmp_path) as (made, client):
        begun = pids(made)
        await kill_plugin(made)
        assert await client.is_asleep("ant")
        assert pids(made) == begun, "the sleeper stays, and nothing is started beside it"
        for number, after_s in enumerate(KILLS_S):
            order = ("ant", "bee") if number % 2 else ("bee", "ant")
            asked = asyncio.create_task(client.answered(*order))
            await asyncio.sleep(after_s)
            await kill_plugin(made)
            await asked
        assert pids(made) == begun, "each was woken, and none loaded again"


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
