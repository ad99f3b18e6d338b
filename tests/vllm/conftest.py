"""Deployments whose engine is vLLM on CPU, started by the Python environment that has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.fakes.polling import wait_until
from tests.vllm.environment import REASON_FILE

KV_BLOCKS = 100
BLOCK_TOKENS = 32
START_UP_S = 600.0
"""A busy machine takes minutes to import vLLM; a quiet one 25 to 60 s."""

ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    # Else every engine binds itself to the same core, and a KV transfer starves beside them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

OPTIONS = (
    "ServiceArgs.resources.gpu=0",
    "load-format=dummy",
    "enforce-eager=true",
    "max-model-len=2048",
    # On a host with AMX vllm-cpu's bf16 kernel ends the process at the first hand-off.
    "dtype=float32",
    f"num-gpu-blocks-override={KV_BLOCKS}",
    f"block-size={BLOCK_TOKENS}",
)
"""Of every section: the tiny model without weights, in few KV blocks."""


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM and dynaplan."""
    path = Path(os.environ.get("DYNAPLAN_VLLM_PYTHON", ""))
    if not path.is_file():
        pytest.skip("DYNAPLAN_VLLM_PYTHON does not name a Python with vLLM; tox -e vllm makes one")
    reason = path.parent.parent / REASON_FILE
    if reason.exists():
        pytest.skip(f"vLLM could not be installed: {reason.read_text()}")
    return path


@pytest.fixture(scope="module")
def deploy_vllm(
    tmp_path_factory: pytest.TempPathFactory, tiny_hf: Path, vllm_python: Path
) -> Iterator[Callable[..., Deployment]]:
    """Start a graph with a configuration on CPU; when the module's tests are over nothing of it is left."""
    deployments: list[Deployment] = []

    def start(graph: str, config: str, sections: tuple[str, ...], *options: str) -> Deployment:
        small = [f"--{section}.{option}" for section in sections for option in OPTIONS]
        directory = tmp_path_factory.mktemp("vllm")
        deployment = Deployment(
            directory, graph, config, f"--Common.model={tiny_hf}", *small, *options, environment=ON_CPU
        )
        deployment.command[0] = str(vllm_python.with_name("dynaplan"))
        deployments.append(deployment)
        deployment.spawn()
        deployment.wait_ready(START_UP_S)
        return deployment

    yield start
    for deployment in deployments:
        in_memory = shared_memory(deployment)
        deployment.close()
        assert in_memory
        for path in in_memory:
            wait_until(lambda path=path: not path.exists(), 10)  # type: ignore[misc]


def shared_memory(deployment: Deployment) -> set[Path]:
    """What its processes share through /dev/shm: vLLM's talk through 200 MiB of it each."""
    return {
        Path(mapping.path)
        for process in deployment.children()
        for mapping in process.memory_maps()
        if mapping.path.startswith("/dev/shm/psm_")
    }
