"""GPUs whose memory other programs use: simulated GPUs, filled and emptied by hand while everything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployment import EXECUTED, Deployment
from tests.e2e.traces import in_torture
from tests.fakes.polling import wait_until

QUIET = ("--Planner.no-operation=true", "--drain-timeout", "3", "--leave-timeout", "3")
AGGREGATED = ("graphs.agg:Frontend", "agg.yaml", *QUIET)
WORKER = "dynamo_VllmWorker"


def fill(directory: Path, *gpus: int) -> None:
    """Have this test's process use 71 GiB of these GPUs."""
    node = directory / "node"
    if not node.exists():
        node.mkdir()
        node.chmod(0o1777)
    for gpu in gpus:
        (node / f"gpu-{gpu}.json").write_text(json.dumps({"used_bytes": 71 * 2**30, "pids": [os.getpid()]}))


def empty(directory: Path, *gpus: int) -> None:
    for gpu in gpus:
        (directory / "node" / f"gpu-{gpu}.json").unlink()


def in_use(gpu: int) -> str:
    return f"GPU {gpu}: 71 of 80 GiB in use by pid {os.getpid()} ("


def gpus_of(deployment: Deployment) -> list[list[int]]:
    """The GPUs of each decode worker, by the statefile."""
    entries = deployment.workers("VllmWorker").values()
    return [entry["resources"].get("allocated_gpus", []) for entry in entries]


def state_of(deployment: Deployment) -> tuple[str, int]:
    entry = deployment.workers("VllmWorker")[WORKER]
    return entry["state"], entry["pid"]


def test_gpus_in_use_are_left_out_until_they_are_free(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    fill(tmp_path, 0, 2)
    deployment = deploy(*AGGREGATED, "--gpus", "3")
    assert in_use(0)[:5] in deployment.text
    assert "GPU 0,2: 71 of 80 GiB in use by pid" in deployment.text
    assert "left out" in deployment.text
    assert gpus_of(deployment) == [[1]]
    refused = deployment.run("scale", "decode=2")
    assert (refused.returncode, "there are 1" in refused.stderr) == (2, True)
    load = ("--clients", "1", "--isl", "100", "--osl", "10", "--for", "1s")
    assert "Others have 2 of its 3 GPUs: left out." in deployment.run("bench", *load).stdout
    empty(tmp_path, 2)
    wait_until(lambda: deployment.run("scale", "decode=2", "--no-wait").returncode == 0, 60)
    wait_until(lambda: gpus_of(deployment) == [[1], [2]], 60)


@in_torture
def test_a_worker_whose_gpu_is_taken_while_it_restarts_waits_and_says_so(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    deployment = deploy(*AGGREGATED, "--gpus", "1")
    fill(tmp_path, 0)
    os.kill(deployment.pid_of(WORKER), 9)

    wait_until(lambda: f"{WORKER} waits: {in_use(0)}" in deployment.text, 60)
    shown = deployment.run("status").stdout
    assert "waiting" in shown
    assert f"{WORKER} waits: {in_use(0)}" in shown
    assert state_of(deployment) == ("starting", 0)
    empty(tmp_path, 0)
    wait_until(lambda: state_of(deployment)[0] == "ready", 60)


@pytest.mark.slow
def test_a_box_without_a_free_gpu_is_refused_unless_busy_ones_may_be_used(tmp_path: Path) -> None:
    fill(tmp_path, 0)

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [*(sys.executable, "-m", "dynaplan", "serve", "graphs.agg:Frontend", "-f", "agg.yaml")]
        return subprocess.run(
            [*command, "--gpus", "1", "--port", "0", *more],
            env={**os.environ, "DYNAPLAN_NODE_DIR": str(tmp_path / "node"), "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    refused, warned = run(), run("--dry-run")
    assert (refused.returncode, warned.returncode) == (2, 0)
    for answer in (refused.stderr, warned.stderr):
        assert in_use(0) in answer
        assert "--use-busy-gpus" in answer
    allowed = run("--dry-run", "--use-busy-gpus")
    assert allowed.returncode == 0
    assert f"{in_use(0)}" in allowed.stdout
    assert "used all the same" in allowed.stdout


@pytest.mark.slow
def test_two_workers_share_a_gpu_and_one_of_them_starts_again_beside_the_other(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    half = ("--VllmWorker.ServiceArgs.resources.gpu=0.5", "--VllmWorker.ServiceArgs.workers=2")
    deployment = deploy(*AGGREGATED, "--gpus", "1", *half, environment=EXECUTED)
    both = deployment.workers("VllmWorker")
    assert [entry["resources"] for entry in both.values()] == [{"allocated_gpus": [0], "gpu_share": 0.5}] * 2
    seen = {psutil.Process(entry["pid"]).environ()["CUDA_VISIBLE_DEVICES"] for entry in both.values()}
    assert len(seen) == 1

    refused = deployment.run("scale", "decode=3")
    assert refused.returncode != 0
    assert "GPU" in refused.stderr

    neighbour = next(name for name in both if name != WORKER)
    fill(tmp_path, 0)  # as far as can be seen: by the neighbour, which runs
    os.kill(both[WORKER]["pid"], signal.SIGKILL)
    wait_until(
        lambda: state_of(deployment)[0] == "ready" and state_of(deployment)[1] != both[WORKER]["pid"], 20
    )
    assert deployment.pid_of(neighbour) == both[neighbour]["pid"]
    assert gpus_of(deployment) == [[0], [0]]
