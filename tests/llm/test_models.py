"""Real models behind one address, on memory for one and a half: swapped by llama.cpp, and none lost.

SmolLM2 under two names, and a model of random weights of another architecture.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.mixed_load import mixed
from tests.e2e.test_models import kill_draining, kill_loading, kill_serve, loads, misdirected
from tests.fakes.tiny_models import tiny_gguf

CONFIG = """
Common: {{max-model-len: 512, max-num-seqs: 4, max-swap-wait: 3, memory: 300MB}}
Frontend: {{access-log: true}}
Models:
  smol: {{model: {smol}}}
  smol-copy: {{model: {smol}}}
  tiny: {{model: {tiny}}}
"""
NAMES = ("smol", "smol-copy", "tiny")
MEMORY = "450MB"
"""One of SmolLM2 takes about 300 MB, with its processes."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("models")
    file = directory / "models.yaml"
    file.write_text(CONFIG.format(smol=model, tiny=tiny_gguf(directory, "qwen2")))
    with Deployment(directory, str(file), "", "--model-memory", MEMORY) as deployment:
        yield deployment.start()


async def test_two_hundred_requests_for_three_real_models_are_answered_by_their_own(
    models: Deployment,
) -> None:
    answers = await mixed(models.url, NAMES, requests=200, clients=40, tokens=8)
    assert [each for each in answers if each.fault] == []
    assert misdirected(models) == []
    seconds = sorted(each.seconds for each in answers)
    swaps = sum(loads(models).values())
    print(
        f"{swaps} loads; {seconds[100]:.1f} s median, {seconds[190]:.1f} s p95, {seconds[-1]:.1f} s longest"
    )


async def test_real_models_lose_nothing_by_kills(models: Deployment) -> None:
    await asyncio.to_thread(models.run, "unload", "smol")
    answers = asyncio.create_task(mixed(models.url, NAMES, requests=120, clients=24, tokens=8))
    for kill in (kill_loading, kill_serve, kill_draining):
        await kill(models)
    assert [each for each in await answers if each.fault] == []
    assert misdirected(models) == []


def cached_tokens(deployment: Deployment, model: str, prompt: str) -> tuple[int, int]:
    """The tokens of the prompt, and how many of them were cached."""
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(deployment.url + "/v1/completions", body, headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        usage = json.load(response)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_a_prompt_is_not_computed_again_after_a_swap(models: Deployment) -> None:
    prompt = "The lights of the harbour went out one by one. " * 40
    tokens, cached = cached_tokens(models, "smol", prompt)
    assert (tokens > 400, cached) == (True, 0)
    models.run("unload", "smol")
    saved = json.loads(models.run("models", "--json").stdout)["models"]["smol"]["saved_kv"]
    assert saved["tokens"] >= tokens
    assert cached_tokens(models, "smol-copy", prompt) == (tokens, 0)  # the same file, another model
    models.run("unload", "smol-copy")
    assert cached_tokens(models, "smol", prompt) == (tokens, tokens - 1)
