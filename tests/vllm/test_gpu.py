"""vLLM on real GPUs. Skipped without; then what these tests say has not been seen."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynaplan.fleet.gpu_devices import nvml
from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import MESSAGES, WORKER, ask, prefills
from tests.fakes.polling import wait_until
from tests.vllm.conftest import START_UP_S
from tests.vllm.test_two_pools import prompt_tokens_by_source

pytestmark = pytest.mark.gpu

SMALL = ("load-format=dummy", "enforce-eager=true", "max-model-len=2048", "gpu-memory-utilization=0.3")
SPARE_BYTES = 1 << 30
"""What other programs may take of a GPU's memory while a test runs."""


def used_bytes() -> list[int]:
    """The memory in use on each GPU, whoever uses it."""
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


@pytest.fixture
def deploy(tmp_path: Path, tiny_hf: Path, vllm_python: Path) -> Iterator[Callable[..., Deployment]]:
    """Start a graph on the box's GPUs; at the end their memory is free again."""
    if not nvml():
        pytest.skip("no NVIDIA GPU here")
    before = used_bytes()
    deployments: list[Deployment] = []

    def start(graph: str, config: str, *options: str) -> Deployment:
        deployment = Deployment(tmp_path, graph, config, f"--Common.model={tiny_hf}", *options)
        deployment.command[0] = str(vllm_python.with_name("dynaplan"))
        deployments.append(deployment)
        deployment.spawn()
        deployment.wait_ready(START_UP_S)
        return deployment

    yield start
    for deployment in deployments:
        deployment.close()
    wait_until(
        lambda: all(now < was + SPARE_BYTES for now, was in zip(used_bytes(), before, strict=True)), 30
    )


def test_a_killed_worker_gets_its_gpu_back_and_answers_again(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy("graphs.agg:Frontend", "vllm.yaml", *(f"--VllmWorker.{each}" for each in SMALL))
    status, answer = ask(deployment, "/v1/chat/completions", messages=MESSAGES, max_tokens=8, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)

    killed = deployment.pid_of(WORKER)
    os.kill(killed, signal.SIGKILL)

    wait_until(lambda: deployment.pid_of(WORKER) not in (0, killed), 60)
    wait_until(lambda: deployment.workers()[WORKER]["state"] == "ready", START_UP_S)
    status, answer = ask(deployment, "/v1/chat/completions", messages=MESSAGES, max_tokens=8, ignore_eos=True)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 8)


def test_kv_entries_move_from_one_gpu_to_another(deploy: Callable[..., Deployment]) -> None:
    if len(nvml()) < 2:
        pytest.skip("one GPU only")
    sections = ("VllmWorker", "PrefillWorker")
    small = [f"--{section}.{each}" for section in sections for each in SMALL]
    deployment = deploy(
        "graphs.disagg:Frontend", "vllm_disagg.yaml", *small, "--VllmWorker.max-local-prefill-length=0"
    )
    status, _ = ask(deployment, "/v1/chat/completions", messages=MESSAGES, max_tokens=8, ignore_eos=True)
    assert status == 200
    assert prefills(deployment) == {"remote": 1}
    assert asyncio.run(prompt_tokens_by_source(deployment, WORKER))["local_compute"] == 0
