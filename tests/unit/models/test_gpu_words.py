"""The GPUs that an owner's words choose, on a box of four."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import pytest

from dynaplan.contract.gpus import Gpu
from dynaplan.models.gpu_words import OwnersGpus, owners_gpus

BOX = [Gpu(index, f"GPU-{index}{index}-uuid", memory_bytes=24 * 2**30) for index in range(4)]


def on_box(command: str, environment: Mapping[str, str] | None = None) -> OwnersGpus:
    return owners_gpus(shlex.split(command), environment or {}, BOX)


def chosen(command: str, environment: Mapping[str, str] | None = None) -> tuple[int | None, list[int]]:
    found = on_box(command, environment)
    return found.number, sorted(found.allowed)


@pytest.mark.parametrize(
    ("command", "environment", "number", "allowed"),
    [
        ("prog --port 1", {}, None, []),
        ("prog --port 1", {"CUDA_VISIBLE_DEVICES": "1"}, 1, [1]),
        ("prog --port 1", {"CUDA_VISIBLE_DEVICES": "2,0"}, 2, [0, 2]),
        ("prog --port 1", {"CUDA_VISIBLE_DEVICES": "GPU-33"}, 1, [3]),
        ("prog --port 1", {"CUDA_VISIBLE_DEVICES": ""}, 0, []),
        ("prog --port 1", {"CUDA_VISIBLE_DEVICES": "-1"}, 0, []),
        ("CUDA_VISIBLE_DEVICES=3 prog", {}, 1, [3]),
        ("env A=b CUDA_VISIBLE_DEVICES=3 prog", {"CUDA_VISIBLE_DEVICES": "0"}, 1, [3]),
        ("bash -c 'CUDA_VISIBLE_DEVICES=1,2 exec llama-server -m a.gguf'", {}, 2, [1, 2]),
        ("nice -n 5 env CUDA_VISIBLE_DEVICES=2 llama-server -m a.gguf", {}, 1, [2]),
        ("docker run --gpus '\"device=0\"' image", {}, 1, [0]),
        ("docker run --gpus '\"device=0,2\"' image", {}, 2, [0, 2]),
        ("docker run --gpus device=1 image", {}, 1, [1]),
        ("docker run --gpus 'device=1,capabilities=utility' image", {}, 1, [1]),
        ("docker run --gpus=2 image", {}, 2, [0, 1]),
        ("docker run --gpus all image", {}, 4, [0, 1, 2, 3]),
        ("docker run --device nvidia.com/gpu=all image", {}, 4, [0, 1, 2, 3]),
        ("docker run --gpus all image --tensor-parallel-size 2", {}, 2, [0, 1]),
        ("docker run --gpus all vllm/vllm-openai:latest --model m", {}, 1, [0]),
        ("docker run --gpus all -e CUDA_VISIBLE_DEVICES=3 image", {}, 1, [3]),
        ("docker run --gpus '\"device=2,3\"' -e CUDA_VISIBLE_DEVICES=1 image", {}, 1, [3]),
        ("docker run --runtime nvidia -e NVIDIA_VISIBLE_DEVICES=1 image", {}, 1, [1]),
        ("docker run -e NVIDIA_VISIBLE_DEVICES=void image", {}, 0, []),
        ("podman run --device nvidia.com/gpu=1 --device nvidia.com/gpu=2 image", {}, 2, [1, 2]),
        ("docker run --device /dev/fuse image", {}, None, []),
        ("docker run image", {"CUDA_VISIBLE_DEVICES": "1"}, None, []),
        ("llama-server -m a.gguf --tensor-split 3,1", {}, 2, []),
        ("llama-server -m a.gguf -ts 1,0,1", {}, 2, [0, 2]),
        ("llama-server -m a.gguf -ts 1,1,1,1,1,1", {}, 4, []),
        ("llama-server -m a.gguf", {"LLAMA_ARG_TENSOR_SPLIT": "1,1"}, 2, []),
        ("llama-server -m a.gguf -sm none -mg 2", {}, 1, [2]),
        ("llama-server -m a.gguf --split-mode none", {}, 1, []),
        ("llama-server -m a.gguf -mg 1", {}, 4, []),
        ("llama-server -m a.gguf --device CUDA0,CUDA3", {}, 2, [0, 3]),
        ("llama-server -m a.gguf --device CUDA1", {"CUDA_VISIBLE_DEVICES": "2,3"}, 1, [3]),
        ("llama-server -m a.gguf --device none", {}, 0, []),
        ("llama-server -m a.gguf -ngl 0", {}, 0, []),
        ("llama-server -m a.gguf -ngl 99", {"LLAMA_ARG_N_GPU_LAYERS": "0"}, None, []),
        ("llama-server -m a.gguf", {"LLAMA_ARG_N_GPU_LAYERS": "0"}, 0, []),
        ("vllm serve m -tp 2 --pipeline-parallel-size 2", {}, 4, []),
        ("vllm serve m", {"CUDA_VISIBLE_DEVICES": "1,2"}, 1, [1]),
        ("python -m sglang.launch_server --tp-size=2", {"CUDA_VISIBLE_DEVICES": "3,1,0"}, 2, [1, 3]),
    ],
)
def test_the_words_of_an_owner_choose_the_gpus_of_his_program(
    command: str, environment: Mapping[str, str], number: int | None, allowed: list[int]
) -> None:
    assert chosen(command, environment) == (number, allowed)


def test_a_program_that_names_gpus_by_position_has_to_see_those_before_them() -> None:
    assert on_box("llama-server -m a.gguf --device CUDA2").visible == (0, 1, 2, 3)
    assert on_box("llama-server -m a.gguf -ts 1,1").visible == ()
    masked = on_box("llama-server -m a.gguf --device CUDA1", {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert masked.visible == ()  # its mask stands


def test_an_uneven_split_says_what_its_fullest_gpu_gets() -> None:
    assert on_box("llama-server -m a.gguf -ts 3,1").largest_part == 0.75
    assert on_box("llama-server -m a.gguf -ts a,b").largest_part == 0.0


def test_the_words_are_given_as_they_stand() -> None:
    container = on_box("docker run --gpus '\"device=0,1\"' image --tensor-parallel-size 2")
    assert container.said == '--gpus "device=0,1", --tensor-parallel-size 2'
    assert on_box("prog", {"CUDA_VISIBLE_DEVICES": "1"}).said == "CUDA_VISIBLE_DEVICES=1"


def test_a_choice_of_gpus_that_are_not_there_is_said_and_counts_on_none() -> None:
    found = on_box("prog", {"CUDA_VISIBLE_DEVICES": "7"})
    assert (found.number, found.allowed) == (0, frozenset())
    assert found.missing == "CUDA_VISIBLE_DEVICES=7 names no GPU of this deployment, which has 0, 1, 2, 3"
