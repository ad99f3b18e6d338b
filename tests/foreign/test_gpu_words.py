"""Where a model runs is its owner's word: on a box of two GPUs of 24 GiB."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dynaplan.engines.model_memory import gguf_shape
from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until
from tests.fakes.tiny_models import tiny_gguf
from tests.foreign.two_gpus.box import ask, models, two_gpus

CONTAINERS = """
models:
  big:
    cmd: docker run --rm --name big --gpus '"device=0"' -p ${PORT}:8000 image --model org/big
    cmdStop: docker stop big
  other:
    cmd: docker run --rm --name other --gpus '"device=0"' -p ${PORT}:8000 image --model org/other
    cmdStop: docker stop other
  both:
    cmd: >
      docker run --rm --name both --gpus '"device=0,1"' -p ${PORT}:8000 image --model org/both
      --tensor-parallel-size 2
    cmdStop: docker stop both
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def start(config: str, *options: str) -> Deployment:
        made.append(two_gpus(tmp_path, config, *options))
        return made[-1].start()

    try:
        yield start
    finally:
        for each in made:
            each.close()


def dry_run(directory: Path, config: str) -> subprocess.CompletedProcess[str]:
    made = two_gpus(directory, config)
    return made.run(*made.command[1:], "--dry-run")


def of_30_gb(directory: Path, words: str = "") -> str:
    """Return a llama-swap file with a llama-server whose KV entries take 30 GiB."""
    file = tiny_gguf(directory)
    shape = gguf_shape(file)
    assert shape is not None
    context = int(30e9 / shape.bytes_per_token())
    command = f"llama-server --port ${{PORT}} -m {file} -ngl 99 -c {context} -np 1 {words}"
    return f"models: {{one: {{cmd: '{command}'}}}}"


def test_containers_of_a_file_without_groups_run_one_at_a_time_on_the_gpus_that_they_name(
    serve: Callable[..., Deployment],
) -> None:
    deployment = serve(CONTAINERS)
    assert "loaded alone, as in llama-swap without groups" in deployment.text
    names = ["big", "other", "both"]
    with ThreadPoolExecutor(3) as at_once:
        answers = dict(zip(names, at_once.map(lambda name: ask(deployment, name), names), strict=True))
    assert {name: answer["gpus"] for name, answer in answers.items()} == {
        "big": [0],
        "other": [0],
        "both": [0, 1],
    }
    assert [name for name, each in models(deployment).items() if each["state"] == "ready"] in [
        [name] for name in names
    ]
    for name in names:
        ask(deployment, name)
        assert models(deployment)[name]["gpus"] == answers[name]["gpus"]
    assert 'on GPU 0,1 (--gpus "device=0,1", --tensor-parallel-size 2)' in deployment.run("why").stdout


def test_of_a_container_its_memory_is_what_the_driver_says_after_its_load(
    serve: Callable[..., Deployment],
) -> None:
    run = """docker run --rm --name one --gpus '"device=0"' -p ${PORT}:8000 image --takes 5000000000"""
    deployment = serve(f"Models: {{one: {{command: {json.dumps(run)}, stop-command: docker stop one}}}}")
    assert models(deployment)["one"]["memory_bytes"] > 20e9, "nearly all of a GPU is assumed"
    ask(deployment, "one")
    wait_until(lambda: models(deployment)["one"]["memory_bytes"] == 5_000_000_000)


def test_a_model_that_is_split_over_two_gpus_gets_both(
    serve: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = serve(of_30_gb(tmp_path, "--tensor-split 1,1"))
    assert ask(deployment, "one")["gpus"] == [0, 1]
    assert "on GPU 0,1 (--tensor-split 1,1)" in deployment.run("why").stdout


def test_a_model_too_large_for_one_gpu_gets_as_many_as_it_needs(
    serve: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = serve(of_30_gb(tmp_path))
    assert ask(deployment, "one")["gpus"] == [0, 1]
    wait_until(lambda: models(deployment)["one"]["gpus"] == [0, 1])


def test_a_mask_stands_before_the_command_and_in_its_environment(
    serve: Callable[..., Deployment],
) -> None:
    deployment = serve(
        """
models:
  variable: {cmd: "gpu-server --port ${PORT}", env: ["CUDA_VISIBLE_DEVICES=1"]}
  assignment: {cmd: "env CUDA_VISIBLE_DEVICES=1 gpu-server --port ${PORT}"}
"""
    )
    for name in ("variable", "assignment"):
        answer = ask(deployment, name)
        assert (answer["mask"], answer["gpus"]) == ("1", [1])
        assert models(deployment)[name]["gpus"] == [1]


def test_what_can_never_fit_is_said_before_anything_starts(tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path)
    refused = dry_run(tmp_path, f"Models: {{one: {{model: {file}, memory: 200GiB}}}}")
    assert refused.returncode == 2
    assert (
        "it needs 100.0 GiB on each of 2 GPUs, and the largest GPU has 24.0 GiB: never loaded"
        in refused.stderr
    )


def test_a_dry_run_shows_the_gpus_that_owners_have_chosen(tmp_path: Path) -> None:
    shown = dry_run(tmp_path, CONTAINERS).stdout
    assert 'big: on GPU 0 (--gpus "device=0")' in shown
    assert 'both: on GPU 0,1 (--gpus "device=0,1", --tensor-parallel-size 2)' in shown
