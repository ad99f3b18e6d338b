"""Two models, one of them disaggregated, on memory for one and a half: none lost, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.held import serve_of
from tests.e2e.mixed_load import Answer, ask
from tests.fakes.polling import eventually

CONFIG = """
Common: {engine: sim, memory: 50GB, startup-time: 0.3, max-swap-wait: 0.5, ttl: 0}
Models:
  ant:
    conditional-disagg: true
    max-local-prefill-length: 100
    max-prefill-queue-size: 100
    prefill: {memory: 25GB}
  bee: {}
"""
"""On a GPU of 80 GiB a pair of `ant`, or `bee` with the prefill worker of `ant`, that leaves with it."""

LONG = "Say something long. " * 60


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    file = tmp_path / "models.yaml"
    file.write_text(CONFIG)
    with Deployment(tmp_path, str(file), "", "--gpus", "1") as made:
        yield made.start()


def ready(deployment: Deployment, component: str) -> int:
    return sum(each.get("state") == "ready" for each in deployment.workers(component).values())


def is_whole(deployment: Deployment) -> bool:
    return ready(deployment, "ant") == 1 and ready(deployment, "ant-prefill") == 1


async def prefills(session: aiohttp.ClientSession, deployment: Deployment) -> dict[tuple[str, str], int]:
    """The prefills so far, by model and place."""
    async with session.get(f"{deployment.url}/metrics") as response:
        text = await response.text()
    found = re.findall(r'_prefills_total\{[^}]*model="(\w+)",place="(\w+)"[^}]*\} ([\d.]+)', text)
    return {(model, place): int(float(number)) for model, place, number in found}


async def mixed(session: aiohttp.ClientSession, url: str, models: list[str]) -> list[Answer]:
    """Have ten clients ask for these models in turn, every second prompt a long one; return all answers."""
    left = list(enumerate(models))
    answers: list[Answer] = []

    async def client() -> None:
        while left:
            number, model = left.pop()
            prompt = LONG if number % 2 else "Say something."
            answers.append(await ask(session, url, model, is_stream=number % 3 == 0, tokens=8, prompt=prompt))

    await asyncio.gather(*(client() for _ in range(10)))
    return answers


async def test_long_prompts_are_computed_by_the_models_own_prefill_worker_and_swaps_lose_nothing(
    deployment: Deployment,
) -> None:
    async with aiohttp.ClientSession() as session:
        assert not (await ask(session, deployment.url, "ant", is_stream=True, tokens=4)).fault
        await eventually(lambda: is_whole(deployment))
        alone = await mixed(session, deployment.url, ["ant"] * 20)
        placed = await prefills(session, deployment)
        assert (placed["ant", "remote"], placed["ant", "local"]) == (10, 11)
        answers = await mixed(session, deployment.url, ["ant", "ant", "bee", "bee"] * 20)
        assert [each for each in (*alone, *answers) if each.fault] == []
        assert len(answers) == 80
        assert not (await ask(session, deployment.url, "bee", is_stream=True, tokens=4)).fault
        await eventually(lambda: not deployment.workers("ant") and not deployment.workers("ant-prefill"))
        assert not (await ask(session, deployment.url, "ant", is_stream=True, tokens=4)).fault
        await eventually(lambda: is_whole(deployment))
        assert deployment.workers("bee") == {}
        listed = await asyncio.to_thread(deployment.run, "models")
        assert "1 of 1, prefill 1 of 1" in listed.stdout


@pytest.mark.slow
async def test_who_kills_the_prefill_worker_or_serve_loses_no_request(deployment: Deployment) -> None:
    async with aiohttp.ClientSession() as session:
        assert not (await ask(session, deployment.url, "ant", is_stream=True, tokens=4)).fault
        await eventually(lambda: is_whole(deployment))
        answers = asyncio.create_task(mixed(session, deployment.url, ["ant"] * 60))
        (prefill,) = deployment.workers("ant-prefill").values()
        os.kill(prefill["pid"], signal.SIGKILL)
        assert [each for each in await answers if each.fault] == []
        await eventually(lambda: is_whole(deployment))
        pids = {name: each["pid"] for name, each in deployment.workers("ant-prefill").items()}
        answers = asyncio.create_task(mixed(session, deployment.url, ["ant"] * 60))
        serve, adoptions = await eventually(lambda: serve_of(deployment)), deployment.text.count("Adopted")
        serve.kill()
        assert [each for each in await answers if each.fault] == []
        await eventually(lambda: deployment.text.count("Adopted") > adoptions)
        assert {name: each["pid"] for name, each in deployment.workers("ant-prefill").items()} == pids


@pytest.mark.slow
async def test_llama_cpp_hands_the_prompts_of_a_model_over_too_and_both_its_workers_leave(
    tmp_path: Path, tiny_gguf: Path
) -> None:
    common = f"{{engine: llamacpp, model: {tiny_gguf}, max-model-len: 2048, max-num-seqs: 4, threads: 1}}"
    ant = "{conditional-disagg: true, max-local-prefill-length: 100, max-prefill-queue-size: 9, prefill: {}}"
    file = tmp_path / "models.yaml"
    file.write_text(f"Common: {common}\nModels: {{ant: {ant}, bee: {{}}}}\n")
    with Deployment(tmp_path, str(file), "") as made:
        deployment = await asyncio.to_thread(made.start)
        async with aiohttp.ClientSession() as session:
            assert not (await ask(session, deployment.url, "ant", is_stream=True, tokens=4)).fault
            await eventually(lambda: is_whole(deployment))
            answers = await mixed(session, deployment.url, ["ant", "ant", "bee", "bee"] * 5)
            placed = await prefills(session, deployment)
        assert [each for each in answers if each.fault] == []
        assert placed["ant", "remote"] == 5
        assert (await asyncio.to_thread(deployment.run, "unload", "ant")).returncode == 0
        await eventually(lambda: not deployment.workers("ant-prefill"))
        assert ready(deployment, "bee") == 1
